"""Schedules (jobs at set times) and automations (jobs when an alias moves) of the settings."""

from typing import Final

from fastapi import APIRouter

from cairn.service import actions
from cairn.service.access import Reader
from cairn.service.dependencies import PlaneDependency
from cairn.service.http import PermittedRoute
from cairn.service.schemas import AutomationList, ScheduleList

router: Final = APIRouter(tags=["jobs"], route_class=PermittedRoute)


@router.get("/automations")
def list_automations(caller: Reader, plane: PlaneDependency) -> AutomationList:
    """List the automations in this server's settings for the caller's roots, by name.

    Each has the operation that it started last, unless it also covers roots that the caller may
    not use.
    """
    return AutomationList(automations=actions.list_automations(plane, caller))


@router.get("/schedules")
def list_schedules(caller: Reader, plane: PlaneDependency) -> ScheduleList:
    """List the schedules in this server's settings for the caller's roots, by name.

    Each has the times when it was last due and when it is due next.
    """
    return ScheduleList(schedules=actions.list_schedules(plane, caller))
