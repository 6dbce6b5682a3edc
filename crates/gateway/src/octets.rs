//! Bodies of bytes, as the API's description shows them.

use utoipa::ToSchema;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, SchemaFormat, Type};

/// A body of bytes.
pub struct Octets;

impl utoipa::PartialSchema for Octets {
    fn schema() -> RefOr<utoipa::openapi::schema::Schema> {
        let format = SchemaFormat::KnownFormat(KnownFormat::Binary);
        ObjectBuilder::new().schema_type(Type::String).format(Some(format)).description(Some("Bytes, streamed")).into()
    }
}

impl ToSchema for Octets {}
