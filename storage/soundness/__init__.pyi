from .probing import Probe as Probe
from .probing import begin_probe as begin_probe
from .record import is_of_a_probe as is_of_a_probe
