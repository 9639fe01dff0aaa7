from .callers import Caller as Caller
from .callers import Scope as Scope
from .loopback import LoopbackGuard as LoopbackGuard
from .permission import Administrator as Administrator
from .permission import Operator as Operator
from .permission import Reader as Reader
