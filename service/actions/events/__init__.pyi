from .listing import list_events as list_events
from .webhooks import create_webhook as create_webhook
from .webhooks import delete_webhook as delete_webhook
from .webhooks import list_deliveries as list_deliveries
from .webhooks import list_webhooks as list_webhooks
from .webhooks import redeliver as redeliver
from .webhooks import send_test as send_test
