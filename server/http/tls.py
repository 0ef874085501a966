"""The files of the server's TLS certificate and key: checked before uvicorn reads them, and read
again on SIGHUP.

Invariant: files that cannot be used leave the certificate as it was. It knows nothing of
connections.
"""

import logging
import ssl
from pathlib import Path

from server.errors import ConfigurationError

log = logging.getLogger("onehead")


def check_certificate(certificate: Path, key: Path) -> None:
    """Raises ConfigurationError for files that are missing, are no certificate or no key, or do not
    belong together.
    """
    _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, key)


def reload_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Reads the files again, for the connections that are made from now on."""
    try:
        # A context that refuses a key has taken the certificate already.
        check_certificate(certificate, key)
        _load(context, certificate, key)
        log.info("SIGHUP: the TLS certificate was read again")
    except ConfigurationError as error:
        log.error("SIGHUP: the TLS certificate stays as it was: %s", error)


def _load(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    def no_password() -> str:
        raise ConfigurationError(
            f"server.tls_key {key}: is encrypted; a key without a password is needed"
        )

    try:
        for path in (certificate, key):
            path.open("rb").close()  # Names the file, which the library does not.
        context.load_cert_chain(certificate, key, no_password)
    except OSError as error:
        raise ConfigurationError(
            f"server.tls_certificate {certificate}, server.tls_key {key}: expected a certificate "
            f"and its key, both in PEM ({error})"
        ) from None
