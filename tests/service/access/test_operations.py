"""Lists of operations: what a caller is shown of them, and idempotency keys of callers."""

from fastapi.testclient import TestClient

from cairn import create_app
from tests.service.access.conftest import ADDRESS, ELSEWHERE, Keys, bearer
from tests.service.stores import make_run


def test_list_is_filtered_sorted_and_paged_by_either_database(settings, database_url):
    for place in settings.root_uris.values():
        make_run(place / "run", [1, 20])
        make_run(place / "runner", [1])
    changes = {"jobs_database_url": database_url, "worker": False}
    settings = settings.model_copy(update=changes)
    settings.prepare()
    keys = Keys(settings.database_url)
    everywhere = bearer(keys.make("everywhere", "operate"))
    local = bearer(keys.make("local", "operate", roots=["default"]))
    with TestClient(create_app(settings), ADDRESS, client=ELSEWHERE) as http:

        def start(caller, path, **body):
            answer = http.post(f"/v1/roots/{path}", json=body, headers=caller)
            assert answer.status_code == 202, answer.text
            return answer.json()["id"]

        def listed(caller=everywhere, **query):
            """Ids, in pages of two operations."""
            ids, token = [], {}
            while token is not None:
                parameters = {"page_size": 2, **query, **token}
                page = http.get("/v1/operations", params=parameters, headers=caller).json()
                ids += [one["id"] for one in page["operations"]]
                token = page["next_page_token"] and {"page_token": page["next_page_token"]}
            return ids

        run = "default/runs/run"
        first = start(everywhere, f"{run}/checkpoints/1:verify")
        second = start(local, f"{run}/checkpoints/20:verify")
        merged = start(local, f"{run}/checkpoints/20:gather", dtype="float16", items=["model"])
        elsewhere = start(everywhere, "other/runs/runner/checkpoints/1:verify")
        every = {first, second, merged, elsewhere}
        http.post(f"/v1/operations/{second}:cancel", headers=local)
        shown = http.get(f"/v1/operations/{merged}", headers=local).json()
        assert shown["caller"] == "local"
        in_page = http.get("/v1/operations", headers=everywhere).json()["operations"]
        assert shown in in_page
        assert listed() == [one["id"] for one in in_page]
        assert len(listed()) == len(every)
        assert set(listed(local)) == every - {elsewhere}
        for filter, found in {
            'kind = "gather" OR state = "cancelled"': {merged, second},
            'run = "run" AND step > 3': {second, merged},
            'run:"UNN"': {elsewhere},
            'caller = "local" AND NOT dtype:*': {second},
            'dtype = "float16"': {merged},
            f'created = "{shown["created"]}" AND kind = "gather"': {merged},
            'created < "2026-01-01T00:00:00Z"': set(),
        }.items():
            assert set(listed(filter=filter)) == found, filter
        assert set(listed(state="cancelled", filter="step = 20")) == {second}
        by_step = listed(order_by="step desc, dtype")
        assert by_step[:2] == [merged, second]  # those without a dtype come last
        assert set(by_step[2:]) == {first, elsewhere}
        refused = http.get("/v1/operations?filter=kind=exprot", headers=local)
        assert (refused.status_code, "expected one of adopt" in refused.text) == (422, True)


def test_idempotency_keys_are_apart_by_caller_and_by_root(settings):
    """Whoever uses one that another has used is neither refused nor told of it."""
    (other,) = set(settings.root_uris) - {"default"}
    for place in settings.root_uris.values():
        make_run(place / "run", [1])
    settings.prepare()
    keys = Keys(settings.database_url)
    callers = {
        "everywhere": bearer(keys.make("everywhere", "operate")),
        "local": bearer(keys.make("local", "operate", roots=["default"])),
    }
    once = {"Idempotency-Key": "nightly"}
    with TestClient(create_app(settings), ADDRESS, client=ELSEWHERE) as http:

        def verify(caller, root, body):
            path = f"/v1/roots/{root}/runs/run:verify"
            return http.post(path, json=body, headers=callers[caller] | once)

        asked = [("everywhere", other), ("everywhere", "default"), ("local", "default")]
        first = [verify(*one, {}) for one in asked]
        assert [answer.status_code for answer in first] == [202, 202, 202]
        ids = [answer.json()["id"] for answer in first]
        assert len(set(ids)) == 3
        assert [verify(*one, {}).json()["id"] for one in asked] == ids
        for one in asked:
            answer = verify(*one, {"steps": "none"})
            assert answer.status_code == 422
            assert "Idempotency-Key 'nightly' belongs to the request of operation" in answer.text
            assert f"another one than its verify of {one[1]}/run" in answer.text
            assert [identity in answer.text for identity in ids] == [one == this for this in asked]
