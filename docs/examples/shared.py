"""What the programs of this folder share: passages, a search, a tool that reads one, and what they tell of reuse."""

from pathlib import Path

import httpx
from sklearn.feature_extraction.text import TfidfVectorizer

PASSAGES = {
    path.stem: path.read_text("utf-8").strip() for path in sorted(Path(__file__).with_name("corpus").glob("*.txt"))
}
QUESTIONS = (
    "What stands today where the fog bell was cast?",
    "Who is the captain of the ferry that waits for the bell?",
)

_vectorizer = TfidfVectorizer(stop_words="english")
_rows = _vectorizer.fit_transform(PASSAGES.values())


def search(question: str, k: int = 3) -> dict[str, str]:
    """The k passages that fit best, by name, the best first; any retriever may stand in its place."""
    scores = (_rows @ _vectorizer.transform([question]).T).toarray().ravel()
    names = list(PASSAGES)
    return {names[i]: PASSAGES[names[i]] for i in scores.argsort()[::-1][:k]}


def read(document: str) -> str:
    """A tool: its result is a text, so separators make a chunk of the passage."""
    return f"<|chunk|>{PASSAGES[document]}<|chunk|>"


DOCUMENT = {
    "type": "object",
    "properties": {"document": {"type": "string", "enum": list(PASSAGES)}},
    "required": ["document"],
}
READ = {
    "type": "function",
    "function": {"name": "read", "description": "Returns a document.", "strict": True, "parameters": DOCUMENT},
}


def tell(response: httpx.Response) -> None:
    """An event hook of httpx, on which most clients stand: prints what the server says of the chunks of a request."""
    if "x-chunk-cache" in response.headers:
        print(f"   {response.headers['x-chunk-cache']}")
