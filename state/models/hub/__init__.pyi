from .bridge import EasyBridgeMixin as EasyBridgeMixin
