"""End of a child process when its parent ends, also if the parent is killed."""

import os
import threading


def end_with_parent() -> None:
    """Start a thread that ends this process once its stdin is closed, as the parent's end does."""

    def wait() -> None:
        while os.read(0, 1):  # not sys.stdin: its lock would block the exit
            pass
        os._exit(1)

    threading.Thread(target=wait, name="cairn-parent", daemon=True).start()
