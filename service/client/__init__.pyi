from .addresses import Address as Address
from .addresses import find_step as find_step
from .client import Client as Client
from .connection import DEFAULT_ROOT as DEFAULT_ROOT
