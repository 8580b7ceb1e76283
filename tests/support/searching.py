"""A secret, and how it is looked for."""

from __future__ import annotations

import base64

SECRET = "Xaver7Quilt"


def is_in(secret: str, data: bytes) -> bool:
    """Whether it is there, in any of several encodings."""
    plain = [secret.encode(code) for code in ("utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")]
    # It can lie in base64 in three ways; its first and last letters depend on what is beside it.
    coded = [base64.b64encode(bytes(shift) + secret.encode())[4:-4] for shift in range(3)]
    data = data.lower()
    return any(form.lower() in data for form in (*plain, *coded, secret.encode().hex().encode()))
