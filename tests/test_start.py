"""What `Start` does beside printing where the page is."""

import gc
from types import SimpleNamespace

from ui.lifecycle import Start


def test_garbage_is_collected_once_the_app_is_ready(capsys):
    server = SimpleNamespace(started=True, should_exit=False)
    engine = SimpleNamespace(wait_ready=lambda: None, capabilities=lambda: {"model": "m", "device": "cpu"})
    gc.disable()
    try:
        Start(server, engine, "http://localhost:1", open_browser=False)._wait()  # type: ignore[arg-type]
        assert gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
    assert "KVScope ready: http://localhost:1" in capsys.readouterr().out
