from . import adopt as adopt
from . import clean_up as clean_up
from . import convert as convert
from . import gather as gather
from . import restore as restore
from . import verify as verify
