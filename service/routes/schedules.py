"""What the settings have done: again and again, or when an alias moves."""

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
    """Automations of this server's settings for roots of the caller, by name.

    With what each started last, unless it is for roots of others too.
    """
    return AutomationList(automations=actions.list_automations(plane, caller))


@router.get("/schedules")
def list_schedules(caller: Reader, plane: PlaneDependency) -> ScheduleList:
    """Schedules of this server's settings for roots of the caller, by name.

    With when each was and is due.
    """
    return ScheduleList(schedules=actions.list_schedules(plane, caller))
