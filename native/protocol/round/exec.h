// The operations that the protocol's text asks of a backend. An Exec is one thread's view of the kernel that it runs
// in: cpu::Exec (a CTA is one thread; a rank has several CTAs), cuda::Exec, and those that tests put in their place. An
// operation is a call that the text makes; its effect stands beside it. `Tag` and `Join` are in signal.h;
// docs/protocol.md explains them.
//
// ExecCheck<E> does not compile where E lacks one of them: the error shows the line that names it.
#pragma once

#include "protocol/round/numeric.h"
#include "protocol/round/signal.h"
#include "protocol/round/stage.h"
#include "protocol/round/words.h"

namespace putget {

template <class Left, class Right>
struct SameType {
  static constexpr bool kYes = false;
};
template <class Type>
struct SameType<Type, Type> {
  static constexpr bool kYes = true;
};

template <class Exec>
class ExecCheck {
  static Exec& exec();
  template <class Type>
  static Type& a();
  template <class Wanted, class Found>
  static constexpr bool kIs = SameType<Wanted, Found>::kYes;
  using Access16 = typename Exec::Access16;  // 16 bytes that one instruction moves
  using Element = BFloat16;                  // stands for any output type
  using Row = Pack<Element, 8>;
  using Eight = float (&)[8];
  using Sixteen = float (&)[kWirePack];

  // --- who the thread is: in its CTA, in its warp, in its grid
  static_assert(kIs<uint32_t, decltype(exec().thread())> && kIs<uint32_t, decltype(exec().threads())>);
  static_assert(kIs<uint32_t, decltype(exec().lane())> && kIs<uint32_t, decltype(exec().lanes())>);
  static_assert(kIs<uint32_t, decltype(exec().warp())> && kIs<uint32_t, decltype(exec().warps())>);
  static_assert(kIs<uint32_t, decltype(exec().block())> && kIs<uint32_t, decltype(exec().blocks())>);
  static_assert(Exec::kLanes >= 1);
  static_assert(Exec::template put_unroll<Access16>() >= 1);  // accesses in flight before they are stored
  static_assert(kIs<bool, decltype(Exec::kFewTokens || Exec::kManyItems)>);  // the kernel's purpose

  // --- barriers, votes and words between threads of a CTA or lanes of a warp
  using Sync = decltype(exec().sync());                                       // all threads of the CTA
  using SyncWarp = decltype(exec().sync_warp());                              // all lanes of the warp
  static_assert(kIs<bool, decltype(exec().any(true))>);                       // the same as sync; whether any says yes
  static_assert(kIs<bool, decltype(exec().all_lanes(true))>);                 // whether all lanes say yes
  static_assert(kIs<uint32_t, decltype(exec().votes(true))>);                 // a bit for each lane
  static_assert(kIs<uint32_t, decltype(exec().count_lanes(true).before)>);    // lanes that say yes: before this one,
  static_assert(kIs<uint32_t, decltype(exec().count_lanes(true).all)>);       // and all
  static_assert(kIs<uint32_t, decltype(exec().of_lane(a<uint32_t>(), 0u))>);  // another lane's value
  // exec().exchange_in_pair(first, second), where kLanes > 1: lanes of a pair swap values
  using SetBits = decltype(exec().set_bits(a<uint32_t>(), 1u));      // of a word in shared memory
  using Insert = decltype(exec().insert(a<RankSet>(), 0u));          // into a set there
  using Add = decltype(exec().add(&a<unsigned long long>(), 1u));    // to a counter of the rank,
  using AddLoad = decltype(exec().add(&a<int32_t>(), 1u));           // of either kind
  using Count = decltype(exec().count(1u, 0u, 1u, &a<uint32_t>()));  // bits of a set, into a word for each rank
  using Tally = typename Exec::Tally;                                // count, for the sets of several tokens

  // --- between CTAs of a rank
  static_assert(kIs<bool, decltype(exec().template last_to_arrive<Join::J3>(&a<uint32_t>(), &a<uint32_t>()))>);
  using HandOn = decltype(exec().template hand_on<Join::J3>(&a<uint64_t>(), uint64_t{1}));            // release, GPU
  static_assert(kIs<uint64_t, decltype(exec().template take_over<Join::J3>(&a<const uint64_t>()))>);  // acquire, GPU
  static_assert(kIs<bool, decltype(exec().claim(&a<uint32_t>(), 1u))>);       // a word that is 0, for one of them
  static_assert(kIs<uint32_t, decltype(exec().peek(&a<const uint32_t>()))>);  // a word of the state, relaxed
  using NoteWord = decltype(exec().note(&a<uint32_t>(), 1u));

  // --- between ranks: flags
  using Publish = decltype(exec().template publish<Tag::D3>(&a<uint64_t>(), uint64_t{1}));  // release, system
  using Prepare = decltype(exec().prepare_publish());  // earlier writes are released by ...
  using PublishPrepared = decltype(exec().template publish_prepared<Tag::C2>(&a<uint64_t>(), uint64_t{1}));  // ... this
  static_assert(kIs<uint64_t, decltype(exec().template observe<Tag::D4>(&a<const uint64_t>()))>);  // acquire, system
  // The same for accesses of later kernels alone: their start is the acquire.
  static_assert(kIs<uint64_t, decltype(exec().template observe_ahead<Tag::D4>(&a<const uint64_t>()))>);
  static_assert(kIs<uint64_t, decltype(exec().peek(&a<const uint64_t>()))>);  // an own flag, for its value alone
  using NoteFlag = decltype(exec().note(&a<uint64_t>(), uint64_t{1}));        // one that only this CTA will look at
  static_assert(kIs<bool, decltype(exec().template skips_wait<Tag::D4>())>);  // tests leave waits out

  // --- between ranks: words of sentinel rows, relaxed
  using PutWords = decltype(exec().put_sentinel(&a<SentinelPack>(), a<const SentinelPack>()));
  using PutScale = decltype(exec().put_sentinel(&a<float>(), 1.0f));
  static_assert(kIs<SentinelPack, decltype(exec().template poll<Tag::F2>(&a<const SentinelPack>(), uint64_t{0}))>);
  static_assert(kIs<uint32_t, decltype(exec().template poll<Tag::F2>(&a<const uint32_t>()))>);
  using ClearWords = decltype(exec().clear(&a<SentinelPack>()));  // to the sentinel
  using ClearScale = decltype(exec().clear(&a<uint32_t>()));

  // --- rows, plain
  using Put = decltype(exec().put(&a<Access16>(), a<const Access16>()));
  static_assert(kIs<Access16, decltype(exec().get_or_zero(&a<const Access16>(), 0u))>);  // zero where from is null
  static_assert(kIs<float, decltype(exec().get_or(&a<const float>(), 0u, 1.0f))>);
  // Loads a caller's elements, which may begin anywhere; true: one access may load them.
  static_assert(kIs<Row, decltype(exec().template load_elements<Element, 8>(&a<const uint8_t>(), uint64_t{0}, true))>);
  using StoreElements = decltype(exec().store_elements(&a<uint8_t>(), uint64_t{0}, a<const Row>(), true));

  // --- waiting
  static_assert(kIs<uint64_t, decltype(exec().now_ns())>);                       // of a clock that never goes back
  using Pause = decltype(exec().pause(1u));                                      // after so many looks
  static_assert(kIs<bool, decltype(exec().stopped(&a<const uint32_t>(), 1u))>);  // another CTA has reported a fault
  using ToHost = decltype(exec().publish_to_host(&a<uint32_t>(), 1u));           // release, for a fault record

  // --- kernels before and after this one
  using WaitForEarlier = decltype(exec().wait_for_earlier_work());
  using LetLater = decltype(exec().let_later_work_begin());
  using CountWaited = decltype(exec().count_as_waited(&a<uint32_t>()));  // the last warp lets later work begin

  // --- numbers, each as docs/protocol.md and the oracle round them
  static_assert(kIs<float, decltype(exec().template largest_of<1>(1.0f))>);  // of a group of lanes
  static_assert(kIs<float, decltype(exec().largest_magnitude(a<const Row>(), 0.0f))>);
  static_assert(kIs<float, decltype(exec().inverse_of(1.0f))>);
  using Narrow = decltype(exec().template narrow<Element>(a<Eight>(), a<Row>()));
  static_assert(kIs<Access16, decltype(exec().narrow_to_fp8(a<Sixteen>()))>);
  using WidenFp8 = decltype(exec().widen_fp8(a<const Pack<Fp8, 8>>(), a<Eight>()));

  // --- for compilers and measurements
  using Pin = decltype(exec().pin(a<uint32_t>()));  // the value is in a register from here on
  using Mark = decltype(exec().mark(Stage::kStart));

 public:
  static constexpr bool kComplete = true;
};

}  // namespace putget
