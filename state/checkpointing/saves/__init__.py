"""A save of a step: checked, staged on the host, written, committed by Orbax, published."""
