from .clocks import clock_ahead as clock_ahead
from .probing import Probe as Probe
from .probing import begin_probe as begin_probe
from .probing import probe_now as probe_now
from .probing import recall as recall
from .record import is_of_a_probe as is_of_a_probe
