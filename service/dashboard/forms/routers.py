"""Routers of all forms."""

from typing import Final

from fastapi import APIRouter

from cairn.service.dashboard.forms import (
    adopt,
    aliases,
    checkpoints,
    clean_up,
    convert,
    keys,
    restore,
    roots,
    runs,
    verify,
    webhooks,
    workers,
    writers,
)

ROUTERS: Final[tuple[APIRouter, ...]] = (
    runs.router,
    adopt.router,
    aliases.router,
    checkpoints.router,
    clean_up.router,
    convert.router,
    restore.router,
    verify.router,
    writers.router,
    keys.router,
    webhooks.router,
    roots.router,
    workers.router,
)
