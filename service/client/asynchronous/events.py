"""The part of the HTTP client for events and webhooks."""

from collections.abc import AsyncGenerator, Iterable
from http import HTTPStatus
from typing import Final

import anyio

from cairn.service.client.asynchronous.connection import AsyncConnection
from cairn.service.client.protocol.backoff import Backoff
from cairn.service.client.protocol.paths import segment
from cairn.service.client.protocol.requests import Parameter
from cairn.service.errors import EventsLostError, ProblemResponseError, ServerUnreachableError
from cairn.service.schemas import (
    Delivery,
    DeliveryList,
    DeliveryState,
    Event,
    EventKind,
    EventList,
    NewWebhook,
    Webhook,
    WebhookList,
)

_AT_ONCE: Final = 500  # events per request


class AsyncEventsConnection(AsyncConnection):
    """Connection with the requests for events and webhooks."""

    async def events(
        self,
        *,
        after: int = 0,
        root: str | None = None,
        run: str | None = None,
        kind: EventKind | str | None = None,
        page_size: int = 100,
    ) -> AsyncGenerator[Event, None]:
        """Yield the events so far, in the order in which the catalog recorded them.

        Args:
            after: `id` of the last event that the caller has; events after it are yielded.
            root: Only events of this root; None for all.
            run: Only events of runs with this name; None for all.
            kind: Only events of this kind, such as `alias.moved`; None for all.
            page_size: Events per request.
        """
        pages = self._pages(
            EventList,
            "/v1/events",
            page_size=page_size,
            after=after,
            root=root,
            run=run,
            kind=None if kind is None else str(kind),
        )
        async for page in pages:
            for event in page.events:
                yield event

    async def watch_events(
        self,
        *,
        after: int = 0,
        kinds: Iterable[EventKind | str] | None = None,
        root: str | None = None,
        run: str | None = None,
        patience: float = 300.0,
    ) -> AsyncGenerator[Event, None]:
        """Yield past events, then new ones without end: in order, each event once.

        An event arrives at most some two seconds after the catalog recorded it. The server may be
        down for a while. A caller that stores the `id` of the last event it handled, and passes
        it as `after`, misses none.

        Args:
            after: `id` of the last event that the caller has; 0 for the first event on.
            kinds: Only events of these kinds, such as `alias.moved`; None for all.
            root: Only events of this root; None for all.
            run: Only events of runs with this name; None for all.
            patience: Seconds without an answer until the server counts as unreachable.

        Raises:
            EventsLostError: The last event is gone: the catalog was created anew, or restored from
                an older copy, and events have other ids.
            ProblemResponseError: The kind does not exist, or the caller may not read there; with
                status 410, events after the last one were pruned.
            ServerUnreachableError: No answer for `patience` seconds.
        """
        server = Backoff(patience)
        kind_names = None if kinds is None else [str(kind) for kind in kinds]
        for kind in [] if kind_names is None else kind_names or [""]:
            await self._page(server, kind=kind, page_size=1)  # an unknown kind is refused at once
        only = kind_names[0] if kind_names is not None and len(kind_names) == 1 else None
        last = await self._event(server, after, after) if after else None
        while True:
            page = await self._page(
                server,
                after=after,
                root=root,
                run=run,
                kind=only,
                page_size=_AT_ONCE,
            )
            if last is not None:  # after the page: proves that the page is of the same catalog
                again = await self._event(server, last.id, page.position)
                if again is None:
                    last = None
                elif again.uid != last.uid:
                    raise self._lost(last.id, "another one")
            for event in page.events:
                last = event
                if kind_names is None or event.kind in kind_names:
                    server.begin_again()
                    yield event
            if page.position < after:
                raise self._lost(after, f"{page.position} as the last")
            if after or last is not None:  # else start at the first event again
                after = page.position
            if page.next_page_token is None:
                await anyio.sleep(server.pause())

    async def _event(self, server: Backoff, event: int, position: int) -> Event | None:
        """Return the event with an id; None if it was pruned, but no event after `position` was.

        Raises:
            EventsLostError: The catalog has no such event.
            ProblemResponseError: Events after `position` were pruned.
        """
        try:
            page = await self._page(server, after=event - 1, page_size=1)
        except ProblemResponseError as exc:
            pruned = exc.problem.get("pruned")
            if exc.status == HTTPStatus.GONE and isinstance(pruned, int) and pruned <= position:
                return None
            raise
        if not page.events or page.events[0].id != event:
            raise self._lost(event, "none that this key may read")
        return page.events[0]

    def _lost(self, event: int, found: str) -> EventsLostError:
        return EventsLostError(
            f"{self.url}: expected event {event}, the last one that is known here, found {found}. "
            "The catalog was made anew or restored from an older copy, and numbers its events "
            "anew: look at what is listed now, and watch with after=0."
        )

    async def _page(self, server: Backoff, **parameters: Parameter) -> EventList:
        """Fetch the next events; retry until the server answers."""
        while True:
            try:
                page = await self._get(EventList, "/v1/events", timeout=None, **parameters)
            except (ProblemResponseError, ServerUnreachableError) as exc:
                if server.failed(exc):
                    raise
            else:
                server.answered()
                return page
            await anyio.sleep(server.pause())

    async def webhooks(self) -> list[Webhook]:
        """Return all webhooks, without their secrets."""
        listed = await self._get(WebhookList, "/v1/webhooks")
        return listed.webhooks

    async def create_webhook(
        self,
        url: str,
        *,
        kinds: Iterable[EventKind | str] | None = None,
        roots: Iterable[str] | None = None,
        runs: str = "*",
    ) -> NewWebhook:
        """Create a webhook for events from now on; only this answer has the secret.

        Args:
            url: Address that receives the events.
            kinds: Only events of these kinds, such as `alias.moved`; None for all.
            roots: Only events of these roots; None for all.
            runs: Only events of runs whose name matches this pattern, such as `llama-*`.
        """
        body = {
            "url": url,
            "kinds": None if kinds is None else [str(kind) for kind in kinds],
            "roots": None if roots is None else list(roots),
            "runs": runs,
        }
        return await self._send(NewWebhook, "POST", "/v1/webhooks", body)

    async def delete_webhook(self, webhook: str) -> None:
        """Delete a webhook; events that were not delivered are dropped."""
        await self._answer("DELETE", f"/v1/webhooks/{segment(webhook)}")

    async def test_webhook(self, webhook: str) -> Delivery:
        """Send a test event to a webhook."""
        return await self._send(Delivery, "POST", f"/v1/webhooks/{segment(webhook)}:test")

    async def deliveries(
        self, webhook: str, *, state: DeliveryState | str | None = None, page_size: int = 50
    ) -> AsyncGenerator[Delivery, None]:
        """Yield the deliveries of a webhook, newest first; pages are fetched as needed."""
        path = f"/v1/webhooks/{segment(webhook)}/deliveries"
        in_state = None if state is None else str(state)
        async for page in self._pages(DeliveryList, path, page_size=page_size, state=in_state):
            for delivery in page.deliveries:
                yield delivery

    async def redeliver(self, webhook: str, delivery: int) -> Delivery:
        """Retry a delivery, in whatever state it is."""
        path = f"/v1/webhooks/{segment(webhook)}/deliveries/{delivery}:redeliver"
        return await self._send(Delivery, "POST", path)
