from . import pages as pages
from . import sign_in as sign_in
