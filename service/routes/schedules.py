"""Schedules (jobs at set times) and automations (jobs when an alias moves) of the settings."""

from typing import Final

from fastapi import APIRouter

from cairn.service.access.permission import Reader
from cairn.service.actions import automations, schedules
from cairn.service.dependencies import PlaneDependency
from cairn.service.http.permitted_routes import PermittedRoute
from cairn.service.schemas import AutomationList, ScheduleList

router: Final = APIRouter(tags=["jobs"], route_class=PermittedRoute)


@router.get("/automations")
def list_automations(caller: Reader, plane: PlaneDependency) -> AutomationList:
    """List the automations in this server's settings for the caller's roots, by name.

    Each has the operation that it started last, unless it also covers roots that the caller may
    not use.
    """
    return AutomationList(automations=automations.list_automations(plane, caller))


@router.get("/schedules")
def list_schedules(caller: Reader, plane: PlaneDependency) -> ScheduleList:
    """List the schedules in this server's settings for the caller's roots, by name.

    Each has the times when it was last due and when it is due next.
    """
    return ScheduleList(schedules=schedules.list_schedules(plane, caller))
