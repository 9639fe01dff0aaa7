"""Routers of all pages and their forms."""

from typing import Final

from fastapi import APIRouter

from cairn.service.dashboard import sign_in
from cairn.service.dashboard.pages import (
    adopt,
    audit,
    compare,
    compare_runs,
    compare_steps,
    health,
    help,
    keys,
    operations,
    policies,
    runs,
    webhooks,
)
from cairn.service.dashboard.pages.run import aliases, lineage, steps, storage, writer
from cairn.service.dashboard.pages.step import config, files, forms, overview, plan, tensor, tensors

ROUTERS: Final[tuple[APIRouter, ...]] = (
    runs.router,
    adopt.router,
    steps.router,
    aliases.router,
    lineage.router,
    storage.router,
    writer.router,
    overview.router,
    overview.store_router,
    forms.router,
    tensors.router,
    tensor.router,
    config.router,
    files.router,
    plan.router,
    compare.router,
    compare.store_router,
    compare_runs.router,
    compare_runs.store_router,
    compare_steps.router,
    operations.router,
    health.router,
    health.store_router,
    policies.router,
    help.router,
    audit.router,
    keys.router,
    webhooks.router,
)
"""Routers whose routes require a permission."""

OPEN_ROUTERS: Final[tuple[APIRouter, ...]] = (sign_in.router,)
"""Routers that require no permission: nobody has one before the sign-in."""
