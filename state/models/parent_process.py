"""For programs that another process runs: they end when it does, also when it is killed."""

import os
import threading


def end_with_parent() -> None:
    """End this process once its stdin, which the parent holds open, is closed."""

    def wait() -> None:
        while os.read(0, 1):  # past Python's buffer, whose lock would be held at the end
            pass
        os._exit(1)

    threading.Thread(target=wait, name="cairn-parent", daemon=True).start()
