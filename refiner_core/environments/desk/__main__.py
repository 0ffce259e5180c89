"""Print the desk's own tasks in the form that ``environment.tasks`` takes.

``python -m refiner_core.environments.desk > tasks.jsonl``
"""

from __future__ import annotations

import json

from refiner_core.environments.desk.tasks import own_tasks

if __name__ == "__main__":
    for task in own_tasks():
        print(json.dumps(task.__dict__, ensure_ascii=False))
