"""These run where vLLM is installed, and are not collected elsewhere: ``make test-vllm`` fails where it cannot be."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
