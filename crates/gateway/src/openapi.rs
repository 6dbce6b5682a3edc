//! The OpenAPI 3.1 description, generated from the handlers. What holds for all routes is added here.

use crate::api;
use corral_api::command::PtyMessage;
use corral_api::problem::Problem;
use corral_api::sandbox::Event;
use std::sync::OnceLock;
use utoipa::openapi::path::{Operation, Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::openapi::security::{
    ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme,
};
use utoipa::openapi::{
    ComponentsBuilder, ContentBuilder, InfoBuilder, LicenseBuilder, OpenApi, OpenApiBuilder, Ref, RefOr, Required,
    Response, ResponseBuilder,
};
use utoipa::{PartialSchema as _, ToSchema};

/// The document as pretty JSON with a final line feed: the text of `openapi/corral.json`.
pub fn document() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| {
        let mut text = complete(api::routes().into_openapi()).to_pretty_json().unwrap_or_default();
        text.push('\n');
        text
    })
}

fn complete(generated: OpenApi) -> OpenApi {
    let info = InfoBuilder::new()
        .title("Corral")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some("Agent sandboxes for RL training, evaluation and environment building."))
        .license(Some(LicenseBuilder::new().name("Apache-2.0").identifier(Some("Apache-2.0")).build()))
        .build();
    let mut api: OpenApi = OpenApiBuilder::from(generated).info(info).build();
    let mut components = api.components.take().unwrap_or_else(|| ComponentsBuilder::new().build());
    let mut schemas = vec![];
    Problem::schemas(&mut schemas);
    PtyMessage::schemas(&mut schemas);
    Event::schemas(&mut schemas);
    schemas.push((Problem::name().into(), Problem::schema()));
    schemas.push((PtyMessage::name().into(), PtyMessage::schema()));
    schemas.push((Event::name().into(), Event::schema()));
    components.schemas.extend(schemas);
    components.responses.insert("Problem".into(), RefOr::T(problem_response()));
    components.security_schemes.insert(
        "bearer".into(),
        RefOr::T(SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build())),
    );
    components
        .security_schemes
        .insert("api_key".into(), RefOr::T(SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("X-API-Key")))));
    api.components = Some(components);
    for (path, item) in &mut api.paths.paths {
        for operation in [&mut item.get, &mut item.put, &mut item.post, &mut item.delete].into_iter().flatten() {
            complete_operation(path, operation);
        }
    }
    api
}

fn problem_response() -> Response {
    let content = ContentBuilder::new().schema(Some(Ref::from_schema_name(Problem::name()))).build();
    ResponseBuilder::new()
        .description("What went wrong, as an RFC 9457 problem document")
        .content("application/problem+json", content)
        .build()
}

fn complete_operation(path: &str, operation: &mut Operation) {
    let names = path.split('/').filter_map(|segment| segment.strip_prefix('{')?.strip_suffix('}'));
    let mut parameters: Vec<RefOr<Parameter>> = names.map(|name| RefOr::T(path_parameter(name))).collect();
    parameters.append(operation.parameters.get_or_insert_default());
    operation.parameters = (!parameters.is_empty()).then_some(parameters);
    let problem = RefOr::Ref(Ref::from_response_name("Problem"));
    operation.responses.responses.insert("default".into(), problem);
    if path.starts_with("/v1/") {
        let none: [&str; 0] = [];
        operation.security =
            Some(vec![SecurityRequirement::new("bearer", none), SecurityRequirement::new("api_key", none)]);
    }
    // The handler's name is unique in its module only.
    let tag = operation.tags.as_ref().and_then(|tags| tags.first()).cloned().unwrap_or_default();
    if let Some(id) = operation.operation_id.take() {
        operation.operation_id = Some(if tag == "system" { id } else { format!("{tag}_{id}") });
    }
}

fn path_parameter(name: &str) -> Parameter {
    let text = match name {
        "id" => "Id of the sandbox",
        "command_id" => "Id of the command",
        "session_id" => "Id of the session",
        "key_id" => "Id of the key",
        "digest" => "Digest of the layer",
        _ => "Name, percent-encoded",
    };
    ParameterBuilder::new()
        .name(name)
        .parameter_in(ParameterIn::Path)
        .required(Required::True)
        .description(Some(text))
        .schema(Some(ObjectBuilder::new().schema_type(Type::String).build()))
        .build()
}
