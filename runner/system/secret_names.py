"""Which names of keys say that their value is secret: `password`, `apiKey`, `OPENAI_KEY`; not `num_tokens`, `sort_key`.

A name is read as lower-case words between underscores: hfToken is _hf_token_, DB_PASSWORD is _db_password_.
"""

from __future__ import annotations

import functools
import re

Types = tuple[type, ...]
"""Types of the values that a key hides: none (), texts (str,), or all (object,)."""

LIST = "run.secrets"
"""The key of the list of secrets. Its entries name secrets and are none themselves, so they are shown: whoever repeats
a command that was shown needs them."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

_VENDORS = "|".join(
    (
        # Models and their services.
        "anthropic|claude|cohere|deepgram|deepl|deep_?seek|eleven_?labs|fireworks|gemini|groq|mistral|open_?ai|jina",
        "open_?router|perplexity|replicate|serp_?api|serper|stability|tavily|together|voyage|assembly_?ai|nvidia|ngc",
        "pinecone|qdrant|weaviate|milvus|zilliz|lang_?chain|lang_?smith|langfuse|hf|hugging_?face|kaggle|roboflow",
        # Trackers.
        "wand_?b|weights_and_biases|comet|comet_?ml|neptune|m_?l_?flow|clear_?ml|dags_?hub|label_?box|label_?studio",
        # Clouds.
        "aws|amazon|azure|gcp|gcloud|google|google_cloud|firebase|fcm|ibm|oracle|aliyun|alibaba|tencent|digital_?ocean",
        "linode|hetzner|scaleway|vultr|cloudflare|fastly|akamai|netlify|vercel|heroku|run_?pod|modal|paperspace|minio",
        "wasabi|backblaze|cosmos|cosmos_?db|databricks|data_?bricks|snowflake|redshift|supabase|planetscale",
        # Code and packages.
        "git_?hub|git_?lab|gitea|bitbucket|jira|atlassian|docker|docker_?hub|jfrog|artifactory|npm|py_?pi|nuget|snyk",
        "sonar|sonar_?qube|codecov|circle_?ci|travis|jenkins",
        # What watches, and whom it calls.
        "data_?dog|dd|new_?relic|sentry|grafana|honeycomb|splunk|loggly|rollbar|bugsnag|pager_?duty|ops_?genie|slack",
        "discord|telegram|twilio|send_?grid|mail_?gun|mail_?chimp|mandrill|postmark|spark_?post|vonage|nexmo|zoom",
        # Money, maps, searches and others.
        "stripe|pay_?pal|braintree|adyen|plaid|shopify|coinbase|binance|map_?box|open_?weather|alpha_?vantage|finnhub",
        "quandl|rapid_?api|bing|algolia|meili_?search|typesense|elastic_?search|mongo|mongo_?db|redis|postgres|mysql",
        "kafka|confluent|okta|auth_?0|mixpanel|amplitude|posthog|airtable|notion|hubspot|zendesk|salesforce|twitter",
        "facebook|linkedin|youtube|spotify|dropbox|airflow|prefect|launch_?darkly",
    )
)
_OF_A_VENDOR = (
    "live|test|prod|production|dev|staging|sandbox|app|admin|project|org|organization|team|user|client|server|cloud|"
    "maps|main|my|primary|secondary|default|read|write|ingest|new|old"
)
"""Words between the name of a vendor and `key`."""
_PURPOSES = (
    "storage|hmac|master|admin|server|service|client|app|application|shared|pre_?shared|host|integration|ingest|"
    "ingestion|instrumentation|consumer|developer|deploy|deployment|subscription|webhook|vault|kms|unseal|session|jwt|"
    "crypto|cipher|fernet|aes|rsa|dsa|ecdsa|ed_25519|tls|ssl|gpg|pgp|pem|cert|certificate|decryption|symmetric|secret|bot|"
    "cloud|wallet|billing"
)
"""What a key that is a credential is for. Not what data are found or sorted by: label, sort, group, primary."""

_NAMES_A_SECRET = re.compile(
    r"password|passwd|passphrase|passcode|credential|_p(?:s?w|w)d_|_jwt_|_sas_|_cookies?_|_pin_$|_creds?_|_pw_$|_psk_"
    r"|secrets?_|secret_?key"  # clientSecret, secret_sauce; not secretary
    r"|auth_|_authorization_|_bearer_"  # auth, basic_auth, oauth; not author
    r"|(?:api|access|account|private|signing|encryption|ssh|license|licence)_?keys?_"
    r"|_(?:access|api|auth|refresh|bearer|bot)_tokens_"
    rf"|_(?:{_VENDORS})(?:_(?:{_OF_A_VENDOR}|{_PURPOSES})(?=_))*+_?keys?_(?:\d+_)?$"
    rf"|_(?:{_PURPOSES})_?keys?_(?:\d+_)?$"
    r"|_(?:h?otp|totp|mfa|tfa|2_?fa)_(?:(?:auth|codes?|secrets?|seed|key|pin)_)*$"
    r"|_(?:pin|security|verification|recovery|backup|unlock)_codes?_|_(?:seed|recovery)_phrase_|_mnemonic_|_passkeys?_"
    r"|_dsn_(?:ur[il]_)?$|_conn(?:ection)?_?str(?:ing)?s?_"
    r"|_webhooks?_(?:(?:urls?|uris?|address|endpoint)_)?$"  # who knows it may post
    r"|_service_account_(?:json|info)_"
)
# Only a final token: token_dim, max_token_length and num_tokens are sizes.
_NAMES_A_TOKEN = re.compile(
    r"token_(?:value_)?$"
    r"|_session_id_$|_signature_$"
    r"|_pass_$|[a-z0-9]_pat_$"  # db_pass, GITHUB_PAT; a number is not hidden: num_pass may count passes
)
_IS_IN_A_VOCABULARY = re.compile(
    r"_(?:pad|padding|eos|bos|sos|eot|sot|eod|unk|unknown|cls|sep|separator|oov|end|mask|masked|stop|start|begin|blank"
    r"|image|video|audio|vision|special|newline|placeholder|boi|eoi|boa|eoa)_token_(?:value_)?$"
)


@functools.lru_cache(maxsize=4096)  # a config has the same few hundred keys at each start
def words_of(name: str) -> str:
    """Return `name` as lower-case words between underscores."""
    return f"_{'_'.join(_WORD.findall(name))}_".lower()


@functools.lru_cache(maxsize=4096)
def types_hidden_by(words: str) -> Types:
    """Return the types of values that are secret under a name, as `words_of` returns it; () if none."""
    if _NAMES_A_SECRET.search(words):
        return (object,)
    if _NAMES_A_TOKEN.search(words) and not _IS_IN_A_VOCABULARY.search(words):
        return (str,)
    return ()
