from . import pages as pages
