"""Makes the fixture `job` known to the tests of this folder."""

from tests.job_directories import job, recorder_files

__all__ = ["job", "recorder_files"]
