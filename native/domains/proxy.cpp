#include "domains/proxy.h"

#include <stdexcept>

#include "protocol/round/atomics.h"
#include "protocol/round/signal.h"

namespace putget::proxy {
namespace {

using atomics::load_acquire;
using atomics::load_relaxed;
using atomics::store_relaxed;
using atomics::store_release;

RankSet only(uint32_t rank) {
  RankSet set = RankSet::none();
  set.insert(rank);
  return set;
}

}  // namespace

bool Proxy::Counter::grown() const { return load_acquire(word) == seen + 1; }
bool Proxy::Lane::idle() const { return static_cast<uint32_t>(load_acquire(&over)) == posted; }
bool Proxy::Lane::failed() const { return load_relaxed(&over) >> 32 != 0; }

Proxy::Proxy(const Config& config)
    : config_(config),
      splits_(config_.domains, config_.shape),
      board_(config_.board[config_.rank]),
      has_begun_(!config_.warms_up),
      sent_(config_.epoch),
      closed_(config_.epoch) {
  const Domains& domains = config_.domains;
  // Each rank begins behind itself, so that not all of them send to the same one first.
  for (uint32_t step = 1; step < domains.count(); ++step) {
    const uint32_t domain = (domains.domain_of(config_.rank) + step) % domains.count();
    if (domains.size(domain) > 0) add_sending(domain);
  }
  for (uint32_t step = 1; step < domains.ep_size(); ++step) {
    const uint32_t source = (config_.rank + step) % domains.ep_size();
    if (domains.is_agent_of(config_.rank, source)) add_serving(source);
  }
}

Proxy::Counter Proxy::counter(ParcelKind kind, uint32_t parcel, uint32_t sender) const {
  const putget_transport& transport = *config_.transport;
  Counter found;
  const uint32_t imm = parcel_imm(kind, config_.generation, config_.workspace, parcel, sender);
  if (transport.counter_word(transport.self, imm, &found.word) != PUTGET_TRANSPORT_OK) {
    throw std::runtime_error(transport.error(transport.self));
  }
  found.seen = load_acquire(found.word);
  return found;
}

void Proxy::add_sending(uint32_t domain) {
  const Domains& domains = config_.domains;
  auto made = std::make_unique<Sending>();
  Sending& sending = *made;
  sending.domain = domain;
  sending.lane.peer = domains.agent(config_.rank, domain);
  sending.dispatched = sending.ended = config_.epoch;
  sending.from = splits_.outbox(config_.rank, domain);
  sending.to = splits_.inbox(sending.lane.peer, config_.rank);
  for (uint32_t parcel = 0; parcel < config_.shape.return_parcels(config_.shape.max_tokens); ++parcel) {
    sending.returned.push_back(counter(ParcelKind::kReturn, parcel, sending.lane.peer));
  }
  sending.released = counter(ParcelKind::kReleased, 0, sending.lane.peer);
  for (uint32_t rank = 0; rank < domains.ep_size(); ++rank) {
    const ParcelKind kind = rank < 64 ? ParcelKind::kWaiting : ParcelKind::kWaitingHigh;
    sending.waiting.push_back(counter(kind, rank % 64, sending.lane.peer));
  }
  sending_.push_back(std::move(made));
}

void Proxy::add_serving(uint32_t source) {
  auto made = std::make_unique<Serving>();
  Serving& serving = *made;
  serving.lane.peer = source;
  serving.landed = serving.ended = config_.epoch;
  serving.from = splits_.returns(config_.rank, source);
  serving.to = splits_.return_inbox(source, config_.domains.domain_of(config_.rank));
  const uint32_t most = config_.shape.count(config_.shape.max_tokens);
  for (uint32_t parcel = 0; parcel < most; ++parcel) {
    if (parcel + 1 < most) serving.parcel.push_back(counter(ParcelKind::kParcel, parcel, source));
    serving.last.push_back(counter(ParcelKind::kLastParcel, parcel, source));
  }
  serving.empty = counter(ParcelKind::kEmpty, 0, source);
  serving_.push_back(std::move(made));
}

bool Proxy::step(uint64_t now_ns) {
  bool moved = false;
  step_beats(now_ns);
  if (!has_begun()) return warm_up();
  for (auto& serving : serving_) {
    if (fault_.reason != Lost::kNot) return moved;
    moved |= step_serving(*serving, now_ns);
  }
  for (auto& sending : sending_) {
    if (fault_.reason != Lost::kNot) return moved;
    moved |= step_sending(*sending, now_ns);
  }
  return fault_.reason == Lost::kNot ? step_sent() | moved : moved;
}

bool Proxy::quiet() const { return unfinished().empty(); }

RankSet Proxy::unfinished() const {
  RankSet peers = RankSet::none();
  for (const auto& sending : sending_) {
    if (!sending->lane.idle()) peers.insert(sending->lane.peer);
  }
  for (const auto& serving : serving_) {
    if (!serving->lane.idle()) peers.insert(serving->lane.peer);
  }
  return peers;
}

bool Proxy::resting() const {
  for (const auto& sending : sending_) {
    const uint64_t* doorbell = board_.out(sending->domain);
    const bool has_begun = flag_epoch(load_acquire(doorbell)) != sending->dispatched;
    if (has_begun || sending->posting || sending->ended != sending->dispatched) return false;
  }
  for (const auto& serving : serving_) {
    if (serving->posting || serving->ended != serving->landed) return false;
  }
  return true;
}

// One byte, which means nothing, where a lane's first rows will lie.
Proxy::Post Proxy::post_byte(Lane& lane, uint32_t region, uint64_t from, uint32_t target, uint64_t to) {
  putget_transport_write write{};
  write.region = region;
  write.src_offset = from;
  write.target = target;
  write.dst_offset = to;
  write.bytes = 1;
  write.imm = parcel_imm(ParcelKind::kAsking, config_.generation, config_.workspace, 0, config_.rank);
  return post(lane, write);  // [X11]
}

// A byte to each agent and source.
bool Proxy::warm_up() {
  bool moved = false;
  for (auto& one : sending_) {
    if (fault_.reason != Lost::kNot || one->lane.posted != 0) continue;
    const uint32_t target = config_.inbox_of[one->lane.peer];
    if (post_byte(one->lane, config_.outbox, one->from, target, one->to) != Post::kDone) return moved;
    moved = true;
  }
  for (auto& one : serving_) {
    if (fault_.reason != Lost::kNot || one->lane.posted != 0) continue;
    const uint32_t target = config_.return_inbox_of[one->lane.peer];
    if (post_byte(one->lane, config_.returns, one->from, target, one->to) != Post::kDone) return moved;
    moved = true;
  }
  if (!quiet()) return moved;
  for (const auto& sending : sending_) check(sending->lane, config_.epoch + 1);
  for (const auto& serving : serving_) check(serving->lane, config_.epoch + 1);
  posted_ = {};
  has_begun_.store(true, std::memory_order_release);
  return true;
}

// --- as a source

bool Proxy::step_sending(Sending& sending, uint64_t now_ns) {
  check(sending.lane, sending.dispatched);
  if (fault_.reason != Lost::kNot) return true;
  if (sending.posting) return post_dispatch(sending);
  if (sending.ended == sending.dispatched) return begin_dispatch(sending, now_ns);
  hear_whom_the_agent_waits_for(sending, now_ns);
  if (observe_return(sending)) return true;
  ask_whether_the_agent_lives(sending, now_ns);
  return false;
}

bool Proxy::begin_dispatch(Sending& sending, uint64_t now_ns) {
  const uint64_t doorbell = load_acquire(board_.out(sending.domain));  // [X2]
  const uint32_t epoch = sending.dispatched + 1;
  if (flag_epoch(doorbell) != epoch) return false;
  const uint32_t ended = doorbell_ended(flag_value(doorbell));
  sending.rows = doorbell_rows(flag_value(doorbell));
  if (sending.rows > config_.shape.max_tokens) {
    stop(Lost::kTooManyRows, epoch, only(config_.rank));
    return true;
  }
  if (sending.end_kind != ended) {
    stop(Lost::kEndsDiffer, sending.ended, only(sending.lane.peer));
    return true;
  }
  sending.num_parcels = config_.shape.count(sending.rows);
  sending.next = 0;
  sending.since_ns = now_ns;
  sending.asked = 0;
  sending.posting = true;
  return post_dispatch(sending);
}

bool Proxy::post_dispatch(Sending& sending) {
  const ParcelShape& shape = config_.shape;
  bool moved = false;
  while (sending.posting) {
    putget_transport_write write{};
    ParcelKind kind = ParcelKind::kEmpty;
    if (sending.num_parcels > 0) {
      const uint64_t at = shape.write_at(sending.next);
      kind = sending.next + 1 == sending.num_parcels ? ParcelKind::kLastParcel : ParcelKind::kParcel;
      write.region = config_.outbox;
      write.src_offset = sending.from + at;
      write.dst_offset = sending.to + at;
      write.bytes = shape.write_bytes(sending.rows, sending.next);
    }
    write.target = config_.inbox_of[sending.lane.peer];
    write.imm = parcel_imm(kind, config_.generation, config_.workspace, sending.next, config_.rank);
    if (post(sending.lane, write) != Post::kDone) return moved;  // [X3]
    moved = true;
    if (++sending.next >= sending.num_parcels) {
      sending.posting = false;
      ++sending.dispatched;
    }
  }
  return moved;
}

bool Proxy::observe_return(Sending& sending) {
  const bool released = sending.released.grown();
  const uint32_t num_parcels = config_.shape.return_parcels(sending.rows);
  if (released) {
    sending.released.take();
  } else {
    for (uint32_t parcel = num_parcels; parcel-- > 0;) {
      if (!sending.returned[parcel].grown()) return false;
    }
    for (uint32_t parcel = 0; parcel < num_parcels; ++parcel) sending.returned[parcel].take();
  }
  sending.ended = sending.dispatched;
  sending.end_kind = released ? kEndedByRelease : kEndedByCombine;
  for (uint32_t half = 0; half < 2; ++half) store_relaxed(board_.awaited(sending.domain, half), 0);
  store_release(board_.returned(sending.domain), pack_flag(sending.ended, sending.end_kind));  // [X9]
  return true;
}

// Asked late: an agent tells at half of the deadline, counted from a time that is not before this rank's message.
void Proxy::hear_whom_the_agent_waits_for(Sending& sending, uint64_t now_ns) {
  if (now_ns - sending.since_ns < config_.timeout_ns / 4) return;
  for (uint32_t rank = 0; rank < sending.waiting.size(); ++rank) {
    if (!sending.waiting[rank].grown()) continue;
    sending.waiting[rank].take();
    uint64_t* word = board_.awaited(sending.domain, rank / 64);
    store_relaxed(word, load_relaxed(word) | uint64_t{1} << (rank % 64));
  }
}

// While only its return is missing, no write says that an agent is gone: this one fails then. Again and again, because
// the agent may go at any time.
void Proxy::ask_whether_the_agent_lives(Sending& sending, uint64_t now_ns) {
  const uint64_t next_ns = config_.timeout_ns / 2 + sending.asked * (config_.timeout_ns / 8);
  if (now_ns - sending.since_ns < next_ns) return;
  putget_transport_write write{};
  write.target = config_.inbox_of[sending.lane.peer];
  write.imm = parcel_imm(ParcelKind::kAsking, config_.generation, config_.workspace, 0, config_.rank);
  if (post(sending.lane, write) != Post::kLater) ++sending.asked;  // [X11]
}

bool Proxy::step_sent() {
  if (sending_.empty()) return false;
  for (const auto& sending : sending_) {
    if (sending->dispatched != sent_ + 1 || sending->posting || !sending->lane.idle()) return false;
  }
  ++sent_;
  store_release(board_.sent(), pack_flag(sent_, 0));  // [X0]
  return true;
}

// --- as an agent

bool Proxy::step_serving(Serving& serving, uint64_t now_ns) {
  check(serving.lane, serving.landed);
  if (fault_.reason != Lost::kNot) return true;
  if (serving.posting) return post_return(serving);
  if (serving.ended == serving.landed) return observe_message(serving, now_ns);
  const bool told = tell_whom_it_waits_for(serving, now_ns);
  return begin_return(serving) || told;
}

bool Proxy::observe_message(Serving& serving, uint64_t now_ns) {
  uint32_t num_parcels = 0;
  if (!serving.empty.grown()) {
    while (num_parcels < serving.last.size() && !serving.last[num_parcels].grown()) ++num_parcels;
    if (num_parcels == serving.last.size()) return false;
    for (uint32_t parcel = 0; parcel < num_parcels; ++parcel) {
      if (!serving.parcel[parcel].grown()) return false;
    }
    ++num_parcels;
  }
  // The network may read what went back in the round before until then, and the sums of this round go there.
  if (!serving.lane.idle()) return false;
  if (num_parcels == 0) {
    serving.empty.take();
  } else {
    serving.last[num_parcels - 1].take();
    for (uint32_t parcel = 0; parcel + 1 < num_parcels; ++parcel) serving.parcel[parcel].take();
  }
  ++serving.landed;
  serving.num_parcels = num_parcels;
  serving.since_ns = now_ns;
  serving.told = false;
  const Domains& domains = config_.domains;
  const uint32_t domain = domains.domain_of(config_.rank);
  for (uint32_t place = 0; place < domains.size(domain); ++place) {
    const Board board(config_.board[domains.member(domain, place)]);
    store_release(board.landed(serving.lane.peer), pack_flag(serving.landed, num_parcels));  // [X4]
  }
  return true;
}

bool Proxy::begin_return(Serving& serving) {
  if (!closed_by_all(serving.landed)) return false;
  if (fault_.reason != Lost::kNot) return true;
  serving.rows = 0;
  if (closed_kind_ == kEndedByCombine) {
    const uint64_t doorbell = load_acquire(board_.back(serving.lane.peer));  // [X7]
    if (flag_epoch(doorbell) != serving.landed) return false;
    serving.rows = flag_value(doorbell);
    if (serving.rows > config_.shape.max_tokens || config_.shape.count(serving.rows) != serving.num_parcels) {
      stop(Lost::kTooManyRows, serving.landed, only(config_.rank));
      return true;
    }
  }
  serving.next = 0;
  serving.posting = true;
  return post_return(serving);
}

bool Proxy::post_return(Serving& serving) {
  const ParcelShape& shape = config_.shape;
  const bool combined = closed_kind_ == kEndedByCombine;
  const uint32_t num_parcels = combined ? shape.return_parcels(serving.rows) : 1;
  const ParcelKind kind = combined ? ParcelKind::kReturn : ParcelKind::kReleased;
  bool moved = false;
  while (serving.posting) {
    putget_transport_write write{};
    if (serving.rows > 0) {
      const uint64_t at = uint64_t{serving.next} * shape.return_parcel_rows * shape.return_row_bytes;
      write.region = config_.returns;
      write.src_offset = serving.from + at;
      write.dst_offset = serving.to + at;
      write.bytes = uint64_t{shape.rows_of_return_parcel(serving.rows, serving.next)} * shape.return_row_bytes;
    }
    write.target = config_.return_inbox_of[serving.lane.peer];
    write.imm = parcel_imm(kind, config_.generation, config_.workspace, serving.next, config_.rank);
    if (post(serving.lane, write) != Post::kDone) return moved;  // [X8]
    moved = true;
    if (++serving.next == num_parcels) {
      serving.posting = false;
      serving.ended = serving.landed;
    }
  }
  return moved;
}

bool Proxy::tell_whom_it_waits_for(Serving& serving, uint64_t now_ns) {
  if (serving.told || now_ns - serving.since_ns < config_.timeout_ns / 2) return false;
  serving.told = true;
  const RankSet missing = holding_up(serving.landed);
  for (uint32_t rank = 0; rank < config_.domains.ep_size(); ++rank) {
    if (!missing.has(rank)) continue;
    putget_transport_write write{};
    write.target = config_.return_inbox_of[serving.lane.peer];
    const ParcelKind kind = rank < 64 ? ParcelKind::kWaiting : ParcelKind::kWaitingHigh;
    write.imm = parcel_imm(kind, config_.generation, config_.workspace, rank % 64, config_.rank);
    if (post(serving.lane, write) != Post::kDone) break;  // [X10]
  }
  return true;
}

// Without some source's message no rank of the domain ends the round: then these sources, or their agents where they
// are silent; else the ranks that have not ended it.
RankSet Proxy::holding_up(uint32_t epoch) const {
  const Domains& domains = config_.domains;
  const uint32_t domain = domains.domain_of(config_.rank);
  RankSet missing = RankSet::none();
  for (uint32_t source = 0; source < domains.ep_size(); ++source) {
    if (!domains.is_active(source) || domains.domain_of(source) == domain) continue;
    if (flag_epoch(load_acquire(board_.landed(source))) == epoch) continue;
    const uint32_t agent = domains.agent(source, domain);
    const uint32_t place = domains.place(agent);
    const bool is_silent = load_relaxed(board_.silent(place / 64)) >> (place % 64) & 1;
    missing.insert(is_silent ? agent : source);
  }
  if (!missing.empty()) return missing;
  for (uint32_t place = 0; place < domains.size(domain); ++place) {
    const uint32_t rank = domains.member(domain, place);
    if (flag_epoch(load_acquire(board_.closed(rank))) != epoch) missing.insert(rank);
  }
  return missing;
}

bool Proxy::closed_by_all(uint32_t epoch) {
  if (closed_ == epoch) return true;
  const Domains& domains = config_.domains;
  const uint32_t domain = domains.domain_of(config_.rank);
  // Its kind counts only with this epoch: looked at a second time, the word may say another round's.
  const uint64_t own = load_acquire(board_.closed(config_.rank));
  if (flag_epoch(own) != epoch) return false;
  RankSet others = RankSet::none();
  for (uint32_t place = 0; place < domains.size(domain); ++place) {
    const uint32_t rank = domains.member(domain, place);
    const uint64_t flag = load_acquire(board_.closed(rank));  // [X6]
    if (flag_epoch(flag) != epoch) return false;
    if (flag != own) others.insert(rank);
  }
  closed_ = epoch;
  closed_kind_ = flag_value(own);
  if (!others.empty()) stop(Lost::kEndsDiffer, epoch, others);
  return true;
}

// --- both

// A rank that waits for a source's message cannot see whether the source or its agent is silent: proxies say that they
// run.
void Proxy::step_beats(uint64_t now_ns) {
  if (now_ns < next_beat_ns_) return;
  // A proxy that has slept itself gives the others time to be heard.
  const bool slept = now_ns > next_beat_ns_ + config_.timeout_ns / 8;
  next_beat_ns_ = now_ns + config_.timeout_ns / 16;
  ++beats_;
  const Domains& domains = config_.domains;
  const uint32_t domain = domains.domain_of(config_.rank);
  uint64_t silent[2] = {0, 0};
  for (uint32_t place = 0; place < domains.size(domain); ++place) {
    const uint32_t rank = domains.member(domain, place);
    atomics::store_relaxed(Board(config_.board[rank]).beat(config_.rank), beats_);
    const uint64_t beat = load_relaxed(board_.beat(rank));
    if (slept || beat != beat_[place]) {
      beat_[place] = beat;
      beat_ns_[place] = now_ns;
    }
    if (now_ns - beat_ns_[place] > config_.timeout_ns / 2) silent[place / 64] |= uint64_t{1} << (place % 64);
  }
  for (uint32_t half = 0; half < 2; ++half) store_relaxed(board_.silent(half), silent[half]);
}

Proxy::Post Proxy::post(Lane& lane, putget_transport_write write) {
  const putget_transport& transport = *config_.transport;
  // Nobody else changes the words while nothing is under way; a word that is never reset would wrap into the failures.
  // One that has failed since the last look keeps it for the next.
  if (lane.posted != 0 && lane.idle() && !lane.failed()) {
    lane.posted = 0;
    store_relaxed(&lane.over, 0);
  }
  write.size = sizeof(write);
  write.over = &lane.over;
  const int status = transport.write(transport.self, &write);
  if (status == PUTGET_TRANSPORT_FULL) return Post::kLater;
  if (status != PUTGET_TRANSPORT_OK) {
    const bool down = status == PUTGET_TRANSPORT_LOST;
    stop(down ? Lost::kPeerDown : Lost::kNetwork, sent_ + 1, only(lane.peer));
    return Post::kStopped;
  }
  ++lane.posted;
  ++posted_.writes;
  posted_.bytes += write.bytes;
  return Post::kDone;
}

void Proxy::check(const Lane& lane, uint32_t epoch) {
  if (lane.failed()) stop(Lost::kWriteFailed, epoch, only(lane.peer));
}

void Proxy::stop(Lost reason, uint32_t epoch, const RankSet& missing) {
  if (fault_.reason != Lost::kNot) return;
  fault_ = {reason, epoch, missing};
  const Domains& domains = config_.domains;
  const uint32_t domain = domains.domain_of(config_.rank);
  for (uint32_t place = 0; place < domains.size(domain); ++place) {
    const Board board(config_.board[domains.member(domain, place)]);
    for (uint32_t half = 0; half < 2; ++half) {
      const uint64_t ranks = uint64_t{missing.word[2 * half + 1]} << 32 | missing.word[2 * half];
      store_relaxed(board.missing(config_.rank, half), ranks);
    }
    store_release(board.lost(config_.rank), pack_flag(epoch, static_cast<uint32_t>(reason)));
  }
}

}  // namespace putget::proxy
