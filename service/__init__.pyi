from .app import create_app as create_app
from .client.asynchronous.client import AsyncClient as AsyncClient
from .client.client import Client as Client
from .errors import ServiceError as ServiceError
from .errors import SettingsError as SettingsError
from .settings import Settings as Settings
