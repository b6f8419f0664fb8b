//! Messages, sources and geometries of KV caches: a decoder never crashes, and what it accepts is encoded to the same bytes. A request
//! that is read is planned and checked as a prefiller does it.
#![no_main]

use putget_transfer_kv::{Ask, Geometry, Message, Source, plan};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(source) = Source::from_bytes(bytes) {
        assert_eq!(source.to_bytes(), bytes);
        let _ = source.geometry.check();
    }
    if let Ok(geometry) = Geometry::from_bytes(bytes) {
        assert_eq!(geometry.to_bytes(), bytes);
        let _ = geometry.check();
    }
    let Ok(message) = Message::decode(bytes) else { return };
    assert_eq!(message.encode(), bytes);
    let Message::Request(request) = message else { return };
    let Some(hello) = &request.introduction else { return };
    let checked = hello.target.check().and_then(|()| hello.sources.iter().try_for_each(Geometry::check));
    if checked.and_then(|()| hello.target.check_pages(request.first_token, request.tokens, &request.pages)).is_ok() {
        let (tokens, first_token, segment_tokens) = (request.tokens, request.first_token, request.segment_tokens);
        let ask = Ask { request: &request.request, tokens, first_token, segment_tokens };
        let _ = plan(&hello.sources, &hello.target, &ask);
    }
});
