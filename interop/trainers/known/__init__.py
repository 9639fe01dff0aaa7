"""The trainers whose trees are known; each module defines `TRAINER`."""
