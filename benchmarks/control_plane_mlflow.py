"""MLflow's registry with as many versions, in an environment of its own; see `control_plane.py`.

    <its python> benchmarks/control_plane_mlflow.py DATABASE_URL MODELS VERSIONS

Makes the tables as MLflow does, and fills them by SQL, since its API takes an hour for a
hundred thousand versions. The rows are those that its API writes.
"""

from __future__ import annotations

import sys
import time

from mlflow.store.model_registry.dbmodels.models import SqlModelVersion, SqlRegisteredModel
from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore
from sqlalchemy import insert


def main() -> None:
    models, versions = int(sys.argv[2]), int(sys.argv[3])
    store = SqlAlchemyStore(sys.argv[1])
    now = int(time.time() * 1000)
    with store.engine.begin() as connection:
        for number in range(models):
            name = f"run-{number:04d}"
            connection.execute(
                insert(SqlRegisteredModel),
                {"name": name, "creation_time": now, "last_updated_time": now},
            )
            connection.execute(
                insert(SqlModelVersion),
                [
                    {
                        "name": name,
                        "version": version,
                        "creation_time": now,
                        "last_updated_time": now,
                        "source": f"/srv/models/{name}/{version}",
                        "run_id": f"{number:032x}",
                    }
                    for version in range(1, versions + 1)
                ],
            )


if __name__ == "__main__":
    main()
