from . import happened as happened
from . import webhooks as webhooks
