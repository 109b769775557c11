"""Download: large files and export APIs. Takes a file in pieces, resumes it by range, says where it is."""
