from .command import app as app
