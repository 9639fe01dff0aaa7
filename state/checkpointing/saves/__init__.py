"""A save of a step: checked, held on the host, written, committed by Orbax, published."""
