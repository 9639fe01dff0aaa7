from .error_pages import ErrorPages as ErrorPages
from .rendering import static_files as static_files
from .routers import OPEN_ROUTERS as OPEN_ROUTERS
from .routers import ROUTERS as ROUTERS
