"""The lines by which logs tell that a site on the internet did not answer, or that a host has no address: rows of
`patterns.py`."""

from __future__ import annotations

from .pattern import Pattern

_ERROR = ("Error: ",)

WEB_PATTERNS = (
    Pattern(
        "hub",
        r"(huggingface\.co|hf\.co).{0,300}?(Max retries exceeded|timed out|Failed to resolve)"
        r"|Error: We couldn't connect to '|(on|to) the Hub,? and we cannot find"
        r"|Error: (Connection error, and we cannot find the requested files|Couldn't reach '.{1,300}' on the Hub)"
        r"|OfflineModeIsEnabled: "
        r"|^429 Too Many Requests(:| for url)|Error: (Client|Server) error '(429|50[0234]) "
        r"|^httpx2?\.\w{1,100}: .{0,300}\[Errno -\d\]",
        "huggingface_hub 0.11 to 2.4 (utils/_http.py, file_download.py), requests, urllib3, httpx, transformers 5.23",
    ),
    Pattern("hub", r"(429|50[0234]) (Client|Server) Error", "huggingface_hub 0.11 to 2.4; requests", after=_ERROR),
    Pattern(
        "wandb",
        r"^wandb\..{0,300}: .{0,300}(?P<login>api_key not configured|No API key|not logged in)",
        "wandb 0.16 on",
    ),
    Pattern(
        "wandb",
        r"^wandb\.\S{0,200}(CommError|Error): .{0,300}(timed out|network|connect)|api\.wandb\.ai.{0,300}(Max retries"
        r"|timed out|Failed to)",
        "wandb 0.16 on; requests",
    ),
    Pattern(
        "hub",
        r"(HTTPS?ConnectionPool\(host='.{1,300}Max retries exceeded|<urlopen error \[Errno (-\d|1\d\d)\])",
        "urllib3 and requests; urllib: NLTK, tiktoken, torch.hub",
        after=_ERROR,
    ),
    # --- any other name: of a host of the job, say
    Pattern(
        "name_resolution",
        r"(Temporary failure in name resolution|Name or service not known|No address associated with hostname)",
        "glibc 2.36, gai_strerror: EAI_AGAIN, EAI_NONAME, EAI_NODATA",
        True,
        after=("rror", "Exception"),
    ),
)
