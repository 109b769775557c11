"""The option matrix: every option of a job at the least and the largest value that it may have, alone and in pairs, by
every way in; and what is beyond them, refused by all of them alike."""
