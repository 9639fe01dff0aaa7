"""What the settings have done again and again, and when it is due."""

from typing import Final

from fastapi import APIRouter

from cairn.service import actions
from cairn.service.access import Reader
from cairn.service.dependencies import PlaneDependency
from cairn.service.schemas import ScheduleList

router: Final = APIRouter(prefix="/schedules", tags=["jobs"])


@router.get("")
def list_schedules(caller: Reader, plane: PlaneDependency) -> ScheduleList:
    """Every schedule of this server's settings, by name, with when it was and is due."""
    return ScheduleList(schedules=actions.list_schedules(plane))
