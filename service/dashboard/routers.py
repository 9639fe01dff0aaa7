"""Routers of all pages and forms."""

from typing import Final

from fastapi import APIRouter

from cairn.service.dashboard import sign_in
from cairn.service.dashboard.forms import administration as administration_forms
from cairn.service.dashboard.forms import adopt as adoption_form
from cairn.service.dashboard.forms import runs as run_forms
from cairn.service.dashboard.forms import steps as step_forms
from cairn.service.dashboard.pages import (
    administration,
    adopt,
    compare,
    docs,
    health,
    operations,
    runs,
)
from cairn.service.dashboard.pages.run import aliases, lineage, steps, storage, writer
from cairn.service.dashboard.pages.step import config, files, overview, plan, tensor, tensors

ROUTERS: Final[tuple[APIRouter, ...]] = (
    runs.router,
    adopt.router,
    adoption_form.router,
    steps.router,
    aliases.router,
    lineage.router,
    storage.router,
    writer.router,
    run_forms.router,
    overview.router,
    tensors.router,
    tensor.router,
    config.router,
    files.router,
    plan.router,
    step_forms.router,
    compare.router,
    operations.router,
    health.router,
    docs.router,
    administration.router,
    administration_forms.router,
)
"""Routers whose routes require a permission."""

OPEN_ROUTERS: Final[tuple[APIRouter, ...]] = (sign_in.router,)
"""Routers that require no permission, since callers who sign in have none yet."""
