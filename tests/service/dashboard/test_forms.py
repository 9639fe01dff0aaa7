"""What forms do that no journey sends: a run is verified, a delivery is sent again."""

from tests.service.conftest import BASE_URL
from tests.service.jobs import save_llama, serving, watch
from tests.service.receivers import receiving
from tests.service.seams import sender
from tests.service.stores import make_run

FORM = {"HX-Request": "true", "Origin": BASE_URL}


def test_all_steps_of_a_run_are_verified_by_the_form_of_its_storage_page(root, tmp_path):
    save_llama(root / "llama", (1, 2))
    with serving(root, tmp_path / "data") as http:
        answer = http.post("/ui/default/llama/verify", data={"steps": "all"}, headers=FORM)
        assert answer.status_code == 200
        (operation,) = http.get("/v1/operations").json()["operations"]
        assert operation["id"] in answer.text
        ended = watch(http, operation["id"])
        assert (ended["state"], len(ended["result"]["steps"])) == ("succeeded", 2)


def test_a_delivery_is_sent_again_from_the_page_of_its_webhook(root, tmp_path, monkeypatch):
    monkeypatch.setattr(sender, "POLL_SECONDS", 0.02)
    make_run(root / "run", [3])
    settings = {"scan_seconds": 0, "webhook_networks": "127.0.0.0/8"}
    with serving(root, tmp_path / "data", **settings) as http, receiving() as receiver:
        webhook = http.post("/v1/webhooks", json={"url": receiver.url}).json()["details"]["id"]
        http.post(f"/v1/webhooks/{webhook}:test")
        receiver.wait(receiver.taken)
        path = f"/v1/webhooks/{webhook}/deliveries"
        receiver.wait(lambda: http.get(path).json()["deliveries"][0]["state"] == "delivered")
        (delivery,) = http.get(path).json()["deliveries"]
        page = f"/webhooks/{webhook}"
        answer = http.post(f"{page}/deliveries/{delivery['id']}/redeliver", headers=FORM)
        assert page in (answer.headers.get("HX-Redirect"), answer.headers.get("Location"))
        receiver.wait(lambda: len(receiver.messages) == 2)
        first, second = receiver.messages
        assert first.uid == second.uid == delivery["event"]["uid"]
