"""What a client asks about events and webhooks."""

from collections.abc import Iterable, Iterator

from cairn.service.client.connection import Connection, segment
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


class EventsConnection(Connection):
    """Asks one control plane what happened, and who is told."""

    def events(
        self,
        *,
        after: int = 0,
        root: str | None = None,
        run: str | None = None,
        kind: EventKind | str | None = None,
        page_size: int = 100,
    ) -> Iterator[Event]:
        """What happened, in the order in which the catalog came to know of it.

        Args:
            after: `id` of the last event that is known already: who goes on there misses none.
                0: from the first that is kept.
            root: Only of this root; None: of all.
            run: Only of runs of this name; None: of all.
            kind: Only of this kind, such as `alias.moved`; None: of any.
            page_size: Events that are fetched at a time.

        Raises:
            ProblemResponseError: With status 410 if some after it are not kept any more.
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
        for page in pages:
            yield from page.events

    def webhooks(self) -> list[Webhook]:
        """Everybody who is told of events, without secrets."""
        return self._get(WebhookList, "/v1/webhooks").webhooks

    def create_webhook(
        self,
        url: str,
        *,
        kinds: Iterable[EventKind | str] | None = None,
        roots: Iterable[str] | None = None,
        runs: str = "*",
    ) -> NewWebhook:
        """Have somebody told of what happens from now on; the answer alone has the secret.

        Args:
            url: Where events are sent.
            kinds: Of what, such as `alias.moved`; None: of everything.
            roots: Of which roots; None: of all.
            runs: Of runs with such a name, such as `llama-*`.
        """
        body = {
            "url": url,
            "kinds": None if kinds is None else [str(kind) for kind in kinds],
            "roots": None if roots is None else list(roots),
            "runs": runs,
        }
        return self._send(NewWebhook, "POST", "/v1/webhooks", body)

    def delete_webhook(self, webhook: str) -> None:
        """Tell somebody no more; what was not delivered is dropped."""
        self._answer("DELETE", f"/v1/webhooks/{segment(webhook)}")

    def test_webhook(self, webhook: str) -> Delivery:
        """Send one webhook an event that did not happen."""
        return self._send(Delivery, "POST", f"/v1/webhooks/{segment(webhook)}:test")

    def deliveries(
        self, webhook: str, *, state: DeliveryState | str | None = None, page_size: int = 50
    ) -> Iterator[Delivery]:
        """What became of each event that a webhook is told of, newest first."""
        path = f"/v1/webhooks/{segment(webhook)}/deliveries"
        in_state = None if state is None else str(state)
        for page in self._pages(DeliveryList, path, page_size=page_size, state=in_state):
            yield from page.deliveries

    def redeliver(self, webhook: str, delivery: int) -> Delivery:
        """Have a delivery tried again, whatever came of it."""
        path = f"/v1/webhooks/{segment(webhook)}/deliveries/{delivery}:redeliver"
        return self._send(Delivery, "POST", path)
