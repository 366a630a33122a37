"""The routes of the gateway's HTTP API."""

from __future__ import annotations

from typing import Any, Final

from clients.gateway.rest_api import LISTED_MAX, OFFSET_MAX, RestApi
from clients.gateway.sample_request import NOT_COMPUTED
from clients.gateway.tinker_api import OBJECT, TinkerApi
from clients.wire.gradient_request import SEQ_ID_MAX
from features.services import ServiceContext
from web.calls import FLAG, LINE, TEXT, FieldType, RequestField, integer_type, line_type, query_integer_type
from web.routes import ClientClass, Route, RouteHandlers, RouteReply, RouteSet

PREFIX: Final = "/tinker"
BODY_BYTES_MAX: Final = 6 << 20  # bytes of a request for a gradient: the SDK divides batches into requests of 5 MB
# Bytes of a request for samples: a prompt of the longest context has 65,536 tokens of 7 bytes. The parser of JSON lets no other
# thread run, so larger bodies would interrupt the peer.
SAMPLE_BYTES_MAX: Final = 1 << 20
PROGRAM: Final = ClientClass("program", "folkmoot-program", "key", "X-API-Key")
REFUSED: Final = {"unauthorized": "an unknown key, or a program of another machine or behind a proxy while the peer has no keys"}
CROWDED: Final = REFUSED | {"too-many": "many earlier requests wait for their results: the SDK sends the request again"}
NUMBER: Final = integer_type(0, SEQ_ID_MAX)
SAMPLE_NUMBER: Final = integer_type(0, (1 << 63) - 1)  # a copied client of the SDK begins at a large number
# Fields of a request for samples. Their faults are failures of its future, and not of the call.
SAMPLE_FIELDS: Final = ("prompt", "num_samples", "sampling_params", "prompt_logprobs", "prompt_logprobs_last_n", *NOT_COMPUTED)
# The name of a sampler is stored with at most 64 characters: its session, `:sample:` and a number.
SESSION_ID: Final = line_type(40)
# Ids of models, samplers and requests are made of a session and one or two numbers. Each is stored and sent several times.
ID: Final = line_type(128)
ANYTHING: Final = FieldType("JSON", {}, lambda value: True)
OFFSET: Final = RequestField("offset", query_integer_type(0, OFFSET_MAX), default=0)
RUN: Final = (RequestField("run_id", ID),)
CHECKPOINT: Final = (*RUN, RequestField("kind", ID), RequestField("name", ID))
CHECKPOINT_PATH: Final = "{run_id}/checkpoints/{kind}/{name}"
FUTURE: Final = RouteReply("request_id", "`retrieve_future` has the result")


def _limit(default: int) -> RequestField:
    return RequestField("limit", query_integer_type(0, LISTED_MAX), default=default)


def _post(
    handler: Any, path: str, about: str, reply: RouteReply, *fields: RequestField, method: str = "POST", **more: Any
) -> Route:
    return Route(
        handler=handler,
        method=method,
        path=f"{PREFIX}/api/v1/{path}",
        about=about,
        client=PROGRAM,
        body_fields=fields,
        replies={200: reply},
        problem_codes=CROWDED if reply is FUTURE else REFUSED,
        **more,
    )


def _get(handler: Any, path: str, about: str, reply: RouteReply, **more: Any) -> Route:
    return Route(
        handler=handler,
        method="GET",
        path=f"{PREFIX}/api/v1/{path}",
        about=about,
        client=PROGRAM,
        replies={200: reply},
        problem_codes=REFUSED,
        **more,
    )


def make_handlers(desk: ServiceContext) -> RouteHandlers:
    api = TinkerApi(desk)
    return RouteHandlers(
        objects=(api, api.rest), authorizers={PROGRAM: api.authorize}, background_tasks=(api.run_tasks,), held_replies=api.held
    )


ROUTES: Final = RouteSet(
    prefixes=(PREFIX,),
    routes=(
        _post(TinkerApi.client_config, "client/config", "Show the flags of this gateway", RouteReply("proto_compress_fwdbwd")),
        _post(TinkerApi.client_dynamic_config, "client/dynamic_config", "Show flags that may change", RouteReply()),
        _post(TinkerApi.open_session, "create_session", "Begin a session", RouteReply("session_id info_message")),
        _post(
            TinkerApi.session_heartbeat,
            "session_heartbeat",
            "Show that a program is alive",
            RouteReply("type"),
            RequestField("session_id", SESSION_ID),
        ),
        _post(
            TinkerApi.close_session,
            "sessions/{session_id}/finish",
            "End a session, and the runs of its models after their last requests",
            RouteReply(),
            path_fields=(RequestField("session_id", SESSION_ID),),
        ),
        _post(TinkerApi.collect_telemetry, "telemetry", "Accept telemetry, which is dropped", RouteReply("status")),
        _get(TinkerApi.check_gateway, "healthz", "Check that the gateway answers", RouteReply("status")),
        _get(
            TinkerApi.server_capabilities,
            "get_server_capabilities",
            "List the models that can be tuned",
            RouteReply("supported_models"),
        ),
        _post(
            TinkerApi.create_model,
            "create_model",
            "Open a run of adapters for a model",
            FUTURE,
            RequestField("session_id", SESSION_ID),
            RequestField("model_seq_id", NUMBER),
            RequestField("base_model", TEXT),
            RequestField("lora_config", OBJECT, default={}),
            RequestField("optimizer_config", OBJECT, default={}),
        ),
        _post(
            TinkerApi.get_info,
            "get_info",
            "Describe a model",
            RouteReply("model_id model_name is_lora lora_rank model_data"),
            RequestField("model_id", ID),
        ),
        _post(
            TinkerApi.forward_backward,
            "forward_backward",
            "Compute losses, and add their gradient to the next step",
            FUTURE,
            takes_bytes=True,
            body_bytes_max=BODY_BYTES_MAX,
        ),
        _post(
            TinkerApi.optim_step,
            "optim_step",
            "Request a step with the gradients since the last one",
            FUTURE,
            RequestField("model_id", ID),
            RequestField("seq_id", NUMBER),
            RequestField("adam_params", OBJECT, default={}),
            RequestField("optimizer_params", OBJECT, default={}),
        ),
        _post(
            TinkerApi.save_weights,
            "save_weights",
            "Save a model under a name",
            FUTURE,
            RequestField("model_id", ID),
            RequestField("seq_id", NUMBER),
            RequestField("path", ANYTHING),
            RequestField("ttl_seconds", ANYTHING, default=None),
            RequestField("overwrite", FLAG, default=False),
        ),
        _post(
            TinkerApi.load_weights,
            "load_weights",
            "Continue from a checkpoint, in a model or in a new one",
            FUTURE,
            RequestField("path", LINE),
            RequestField("optimizer", FLAG, default=False),
            RequestField("model_id", ID, default=None),
            RequestField("seq_id", NUMBER, default=None),
            RequestField("session_id", SESSION_ID, default=None),
            RequestField("model_seq_id", NUMBER, default=None),
        ),
        _post(
            TinkerApi.save_weights_for_sampler,
            "save_weights_for_sampler",
            "Create a sampler of the present model, or save the model under a name",
            FUTURE,
            RequestField("model_id", ID),
            RequestField("seq_id", NUMBER),
            RequestField("path", ANYTHING, default=None),
            RequestField("ttl_seconds", ANYTHING, default=None),
            RequestField("sampling_session_seq_id", NUMBER, default=None),
        ),
        _post(
            TinkerApi.open_sampling_session,
            "create_sampling_session",
            "Create a sampler of a finished job, or of a checkpoint",
            RouteReply("sampling_session_id"),
            RequestField("session_id", SESSION_ID),
            RequestField("sampling_session_seq_id", NUMBER),
            RequestField("base_model", LINE, default=None),
            RequestField("model_path", LINE, default=None),
        ),
        _get(
            TinkerApi.get_sampler,
            "samplers/{sampler_id}",
            "Describe a sampler",
            RouteReply("sampler_id base_model model_path"),
            path_fields=(RequestField("sampler_id", ID),),
        ),
        _post(
            TinkerApi.draw_samples,
            "asample",
            "Draw samples, and compute log-probabilities of a prompt",
            FUTURE,
            RequestField("sampling_session_id", ID),
            RequestField("seq_id", SAMPLE_NUMBER),
            *(RequestField(name, ANYTHING, default=None) for name in SAMPLE_FIELDS),
            body_bytes_max=SAMPLE_BYTES_MAX,
        ),
        _post(
            TinkerApi.retrieve_future,
            "retrieve_future",
            "Wait for the result of a request",
            RouteReply("", "The result in JSON or protobuf, `try_again`, or `error` with `category`"),
            RequestField("request_id", ID),
        ),
        _post(
            TinkerApi.cancel_future,
            "cancel_future",
            "Accept that a result is not needed, without effect",
            RouteReply(),
            RequestField("request_id", ID),
        ),
        _get(
            RestApi.list_training_runs,
            "training_runs",
            "List the models of this key, the newest first",
            RouteReply("training_runs cursor"),
            query_fields=(_limit(20), OFFSET),
        ),
        _get(
            RestApi.get_training_run,
            "training_runs/{run_id}",
            "Show a model",
            RouteReply("training_run_id base_model model_owner is_lora lora_rank last_request_time corrupted"),
            path_fields=RUN,
        ),
        _get(
            RestApi.list_checkpoints,
            "training_runs/{run_id}/checkpoints",
            "List the checkpoints of a model",
            RouteReply("checkpoints"),
            path_fields=RUN,
        ),
        _post(
            RestApi.delete_checkpoint,
            f"training_runs/{CHECKPOINT_PATH}",
            "Delete a checkpoint",
            RouteReply(),
            method="DELETE",
            path_fields=CHECKPOINT,
        ),
        _post(
            RestApi.set_checkpoint_ttl,
            f"training_runs/{CHECKPOINT_PATH}/ttl",
            "Set when a checkpoint expires",
            RouteReply(),
            RequestField("ttl_seconds", ANYTHING, default=None),
            method="PUT",
            path_fields=CHECKPOINT,
        ),
        _get(
            RestApi.list_all_checkpoints,
            "checkpoints",
            "List the checkpoints of this key",
            RouteReply("checkpoints cursor"),
            query_fields=(_limit(100), OFFSET),
        ),
        _get(
            RestApi.list_sessions,
            "sessions",
            "List the sessions of this key that have a model or a sampler, the newest first",
            RouteReply("sessions"),
            query_fields=(_limit(20), OFFSET),
        ),
        _get(
            RestApi.get_session,
            "sessions/{session_id}",
            "List the models and samplers of a session",
            RouteReply("training_run_ids sampler_ids"),
            path_fields=(RequestField("session_id", SESSION_ID),),
        ),
        _post(
            RestApi.show_weights,
            "weights_info",
            "Describe a checkpoint",
            RouteReply("base_model is_lora lora_rank train_attn train_mlp train_unembed"),
            RequestField("tinker_path", LINE),
        ),
    ),
    make_handlers=make_handlers,
)
