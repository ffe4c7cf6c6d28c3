"""Makes the fixture `job` known to the tests of this folder."""

from tests.made_jobs import job, written

__all__ = ["job", "written"]
