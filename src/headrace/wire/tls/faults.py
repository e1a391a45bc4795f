"""Puts OpenSSL's handshake errors into words that name the end whose certificate is at fault."""

from __future__ import annotations

import ssl

EXPIRED = 10
NOT_YET_VALID = 9
_OTHER_AUTHORITY = "was not signed by the authority in {ca}"
_VERIFY_WORDS = {
    NOT_YET_VALID: "is not valid yet: compare the clocks of both machines",
    EXPIRED: "has expired",
    18: _OTHER_AUTHORITY,
    19: _OTHER_AUTHORITY,
    20: _OTHER_AUTHORITY,
    21: _OTHER_AUTHORITY,
    7: _OTHER_AUTHORITY,  # same name of the authority, other key
    26: "is for another role (its extended key usage)",
}
"""OpenSSL's verification codes (X509_V_ERR_*) -> what is wrong with the other end's certificate. All else has OpenSSL's own words."""

_ALERT_WORDS = {
    "CERTIFICATE_EXPIRED": "it has expired, or is not valid yet there",
    "UNKNOWN_CA": "it was not signed by the authority that the other end knows",
    "DECRYPT_ERROR": "it was not signed by the authority that the other end knows",
    "UNSUPPORTED_CERTIFICATE": "it is for another role (its extended key usage)",
    "CERTIFICATE_REQUIRED": "none was sent",
    "BAD_CERTIFICATE": "it is not for the name or address that was dialled",
}
"""TLS alerts -> why the other end refused this end's certificate."""

_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE")
"""Reasons that OpenSSL gives for bytes that are no TLS."""


def certificate_fault(error: ssl.SSLCertVerificationError, ca: str) -> str:
    """What is wrong with a certificate that was verified here against the file `ca`: continues "the engine's certificate ..."."""
    words = _VERIFY_WORDS.get(error.verify_code)
    return words.format(ca=ca) if words else f"is refused: {error.verify_message}"


def handshake_fault(error: Exception, *, own: str, peer: str, ca: str) -> str:
    """The reason why a handshake failed; empty when the error does not name one.

    own, peer  what the two ends are called: "this engine" and "the gateway"
    ca         file with the authority that the peer's certificate is verified against
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{peer}'s certificate {certificate_fault(error, ca)}"
    if not isinstance(error, ssl.SSLError):
        return ""
    reason = error.reason or ""
    if "PEER_DID_NOT_RETURN" in reason:
        return f"{peer} sent no certificate"
    if reason in _NO_TLS:
        return f"{peer} does not speak TLS"
    before, separator, alert = reason.partition("ALERT_")
    if separator and before:
        return f"{peer} refused {own}'s certificate: {_ALERT_WORDS.get(alert, alert.replace('_', ' ').lower())}"
    return ""
