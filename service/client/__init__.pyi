from .addresses import Address as Address
from .asynchronous import AsyncClient as AsyncClient
from .client import Client as Client
from .finding import find_step as find_step
from .protocol import DEFAULT_ROOT as DEFAULT_ROOT
