//! Messages survive their bytes, and hostile bytes are refused without harm.

use proptest::prelude::*;
use putget_transfer::{DeviceGroup, Engine, SimNetwork};

use crate::cache::Source;
use crate::geometry::{Digest, Geometry, Kind, Region};
use crate::message::{Hello, Message, Refusal, Request};

fn region(name: String, numbers: [u32; 8], sizes: [u64; 6]) -> Region {
    let kind = match numbers[0] % 3 {
        0 => Kind::Tokens,
        1 => Kind::Window(1 + numbers[0] / 3),
        _ => Kind::State,
    };
    Region {
        name,
        layer: numbers[1],
        kind,
        group: numbers[2],
        memory: numbers[3],
        offset: sizes[0],
        num_pages: sizes[1],
        page_tokens: numbers[4],
        planes: numbers[5],
        num_heads: numbers[6],
        heads: numbers[7]..numbers[0],
        head_bytes: sizes[2],
        page_stride: sizes[3],
        plane_stride: sizes[4],
        token_stride: sizes[5],
        head_stride: sizes[0],
        whole: false,
    }
}

fn geometry() -> impl Strategy<Value = Geometry> {
    let region = (".{0,12}", any::<[u32; 8]>(), any::<[u64; 6]>()).prop_map(|(name, a, b)| region(name, a, b));
    let regions = proptest::collection::vec(region, 0..5);
    (".{0,8}", any::<u32>(), proptest::collection::vec(any::<u64>(), 0..5), regions, any::<u64>()).prop_map(
        |(model, rank, memory, regions, context_bytes)| Geometry { model, rank, memory, regions, context_bytes },
    )
}

fn hello() -> impl Strategy<Value = Hello> {
    (proptest::collection::vec(geometry(), 0..3), any::<u32>(), geometry(), 0_usize..3, any::<bool>()).prop_map(
        |(sources, source, target, memory, context)| {
            let engine = Engine::builder().group(DeviceGroup::sim(&SimNetwork::new(1), 2)).build().unwrap();
            let desc = engine.alloc_mr(4096).unwrap().1;
            Hello { sources, source, target, memory: vec![desc.clone(); memory], contexts: context.then_some(desc) }
        },
    )
}

fn message() -> impl Strategy<Value = Message> {
    let request = (
        (any::<u64>(), ".{0,20}", any::<u32>(), any::<[u64; 7]>()),
        proptest::collection::vec(proptest::collection::vec(any::<u64>(), 0..5), 0..4),
        proptest::option::of(hello()),
    )
        .prop_map(|((receive, request, number, sizes), pages, introduction)| {
            let [tokens, first_token, segment_tokens, count, deadline_ms, context_offset, draw] = sizes;
            Message::Request(Box::new(Request {
                receive,
                request,
                answers: number / 2,
                num_targets: number,
                tokens,
                first_token,
                segment_tokens,
                imm: !number,
                count,
                deadline_ms,
                context_offset,
                draw,
                pages,
                hello: Digest([receive as u8; 32]),
                introduction,
            }))
        });
    let refusal = prop_oneof![Just(Refusal::Geometry), Just(Refusal::Expired), Just(Refusal::Busy)];
    prop_oneof![
        request,
        any::<u64>().prop_map(|receive| Message::Accepted { receive }),
        (any::<u64>(), refusal, ".{0,50}").prop_map(|(receive, refusal, words)| Message::Refused {
            receive,
            refusal,
            words
        }),
        (any::<u64>(), any::<bool>(), ".{0,50}").prop_map(|(receive, may_land, words)| Message::Failed {
            receive,
            may_land,
            words
        }),
        any::<(u64, u32)>().prop_map(|(receive, answers)| Message::Cancel { receive, answers }),
        any::<(u64, bool)>().prop_map(|(receive, may_land)| Message::Cancelled { receive, may_land }),
        ".{0,50}".prop_map(|request| Message::Renew { request }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_message_survives_its_bytes(message in message()) {
        prop_assert_eq!(Message::decode(&message.encode()), Ok(message));
    }

    #[test]
    fn a_message_that_is_cut_or_longer_is_refused(message in message(), cut in any::<prop::sample::Index>()) {
        let bytes = message.encode();
        prop_assert!(Message::decode(&bytes[..cut.index(bytes.len())]).is_err());
        prop_assert!(Message::decode(&[&bytes[..], &[0]].concat()).is_err());
    }

    /// A message that is accepted from changed bytes encodes to the same bytes: nothing is read in two ways.
    #[test]
    fn changed_bytes_do_no_harm(message in message(), changes in proptest::collection::vec(any::<(prop::sample::Index, u8)>(), 1..9)) {
        let mut bytes = message.encode();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(message) = Message::decode(&bytes) {
            prop_assert_eq!(message.encode(), bytes);
        }
    }

    #[test]
    fn any_bytes_do_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..300), code in 0_u8..8) {
        let _ = Message::decode(&bytes);
        let _ = Message::decode(&[&b"PTKV\x01"[..], &[code], &bytes].concat());
        let _ = Source::from_bytes(&bytes);
        let _ = Source::from_bytes(&[&b"PTKS\x01"[..], &bytes].concat());
    }

    #[test]
    fn a_source_survives_its_bytes(geometry in geometry()) {
        let engine = Engine::builder().group(DeviceGroup::sim(&SimNetwork::new(1), 1)).build().unwrap();
        let source = Source { address: engine.main_address(), pool: 7, geometry };
        prop_assert_eq!(Source::from_bytes(&source.to_bytes()), Ok(source));
    }
}

#[test]
fn long_words_are_shortened_at_a_letter() {
    let words = "é".repeat(5000);
    let Ok(Message::Failed { words, .. }) =
        Message::decode(&Message::Failed { receive: 1, may_land: false, words }.encode())
    else {
        panic!("it cannot be read");
    };
    assert_eq!(words, "é".repeat(2048));
}
