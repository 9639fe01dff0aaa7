from .database import upgrade_jobs as upgrade_jobs
from .jobs import Jobs as Jobs
from .jobs import open_jobs as open_jobs
from .worker import Worker as Worker
from .worker import launch_worker as launch_worker
