from .client import AsyncClient as AsyncClient
from .finding import find_step as find_step
