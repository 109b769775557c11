"""Makes what stands under deploy/aws: the policies of the roles and the template.

`python -m deploy.aws.generate` writes them; a test fails when they are stale.
"""
