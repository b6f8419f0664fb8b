#include "domains/transfer_engine.h"

#include <chrono>
#include <cstring>
#include <thread>

#include "error.h"
#include "without_signals.h"

namespace putget::proxy {
namespace {

constexpr uint64_t kMostBytes = 1 << 20;  // of one write
constexpr int kMostNics = 4;
constexpr size_t kMostPosts = 1 << 12;  // that wait for the engine's thread, for each NIC
// Seconds. A peer that stands still is the business of the deadlines of rounds, which name it: the engine's are longer
// than a busy host takes a thread away.
constexpr double kHeartbeat = 1, kHeartbeatLost = 20, kWriteDeadline = 30, kConnect = 10;
constexpr auto kBetweenLooks = std::chrono::microseconds(200);

// On a shared engine a network reserves a range of immediates between these two. The first sixteenth of all immediates
// is left to callers, the last one to ranges that the engine chooses.
constexpr uint64_t kFirstImm = uint64_t{1} << 28, kEndImm = uint64_t{15} << 28;
// Networks of one process begin with another range each, so that a late write of an ended network counts nowhere.
std::atomic<uint32_t> next_range{0};
constexpr size_t kImmBytes = sizeof(uint32_t);  // behind an address: the first immediate of its end
constexpr size_t kGroup = 0;                    // device group

// The words of this thread's last call that failed: the thread that steps proxies may fail while a rank sets up.
std::string& words() {
  static thread_local std::string kept;
  return kept;
}

int status_of(int engines) {
  switch (engines) {
    case PT_OK:
      return PUTGET_TRANSPORT_OK;
    case PT_INVALID:
      return PUTGET_TRANSPORT_INVALID;
    case PT_BUSY:
      return PUTGET_TRANSPORT_FULL;
    default:
      return PUTGET_TRANSPORT_SYSTEM;
  }
}

}  // namespace

TransferEngine::TransferEngine(const EngineOptions& options)
    : library_(options.library), rank_(options.rank), ranks_(options.ranks) {
  table_ = {sizeof(putget_transport),
            PUTGET_TRANSPORT_MAGIC,
            PUTGET_TRANSPORT_VERSION,
            0,
            kMostBytes,
            this,
            add_region,
            describe_region,
            address,
            add_peer,
            add_target,
            counter_word,
            write,
            remove_region,
            error};
  const WithoutSignals masked;
  try {
    open(options);
    stepper_ = std::make_unique<Thread>(ThreadOptions{});
  } catch (...) {
    close();
    throw;
  }
}

TransferEngine::~TransferEngine() {
  stepper_.reset();
  close();
}

void TransferEngine::make_engine(const EngineOptions& options, const std::string& what) {
  std::vector<const char*> nics;
  for (const std::string& nic : options.nics) nics.push_back(nic.c_str());
  const bool chooses = nics.empty();
  pt_device_group group{};
  group.provider = options.provider.c_str();
  // For verbs 0 stands for those that are near; the others have one.
  group.nics = chooses ? (options.provider == "verbs" ? 0 : 1) : nics.size();
  group.sources = chooses ? nullptr : nics.data();
  group.has_gpu = options.gpu >= 0 ? 1 : 0;
  group.gpu = static_cast<uint16_t>(options.gpu >= 0 ? options.gpu : 0);
  pt_engine_options made{};
  made.size = sizeof(made);
  made.groups = &group;
  made.group_count = 1;
  made.secret = options.secret.empty() ? nullptr : options.secret.data();
  made.secret_len = options.secret.size();
  made.heartbeat_interval = kHeartbeat;
  made.heartbeat_timeout = kHeartbeatLost;
  made.default_deadline = kWriteDeadline;
  made.connect_timeout = kConnect;
  made.refuse_when_full = 1;
  // Ranks agree among themselves who goes on, and rounds recognise old rows by their epoch.
  made.readmit = PT_READMIT_AUTO;
  library_.check(library_.pt_engine_create(&made, &engine_), what);
}

// Throws Error, with the engine's words on how many are free.
void TransferEngine::reserve(const std::string& what) {
  const std::string owner = "putget: rounds across domains, rank " + std::to_string(rank_);
  sender_bits_ = sender_bits(ranks_);
  const auto count = static_cast<uint32_t>(range_imms(sender_bits_));
  const uint32_t ranges = static_cast<uint32_t>((kEndImm - kFirstImm) / count);
  for (uint32_t tried = 0; tried < ranges; ++tried) {
    const uint32_t range = next_range.fetch_add(1, std::memory_order_relaxed) % ranges;
    const uint32_t first = static_cast<uint32_t>(kFirstImm) + range * count;
    if (library_.pt_reserve_imms(engine_, owner.c_str(), 1, first, count, &imms_, &first_imm_) == PT_OK) return;
  }
  library_.check(library_.pt_reserve_imms(engine_, owner.c_str(), 0, 0, count, &imms_, &first_imm_), what);
}

void TransferEngine::open(const EngineOptions& options) {
  const bool is_shared = options.engine != nullptr;
  const std::string what = is_shared ? "network engine" : "network \"" + options.provider + "\"";
  if (is_shared) {
    library_.check(library_.pt_engine_share(options.engine, &engine_), what);
    write_deadline_ = kWriteDeadline;
    reserve(what);
  } else {
    make_engine(options, what);
  }
  const bool chooses = options.nics.empty();
  pt_poster* poster = nullptr;
  int status = PT_OK;
  // With NICs of the engine's choice, it says how many there are by refusing one more.
  for (int nic = 0; nic < static_cast<int>(chooses ? kMostNics : options.nics.size()); ++nic) {
    status = library_.pt_poster_create(engine_, kGroup, nic, kMostPosts, &poster);
    if (status != PT_OK) break;
    posters_.push_back(poster);
  }
  if (posters_.empty() || !chooses) library_.check(status, what);
}

void TransferEngine::close() {
  for (pt_poster* poster : posters_) library_.pt_poster_destroy(poster);
  for (uint32_t target = 0; target < targets_.end(); ++target) {
    const std::unique_ptr<Target> taken(targets_.take(target));
    if (taken != nullptr) library_.pt_desc_destroy(taken->desc);
  }
  for (uint32_t region = 0; region < regions_.end(); ++region) {
    if (pt_mr* const memory = regions_.take(region)) library_.pt_mr_destroy(engine_, memory);
  }
  library_.pt_imms_destroy(imms_);
  library_.pt_engine_destroy(engine_);
}

int TransferEngine::tell(int status) {
  if (status != PT_OK) words() = library_.pt_last_error();
  return status_of(status);
}

int TransferEngine::refuse(const char* why) {
  words() = why;
  return PUTGET_TRANSPORT_INVALID;
}

// --- the table

int TransferEngine::add_region(void* self, void* start, uint64_t bytes, int32_t device, uint32_t* region) {
  TransferEngine& end = *static_cast<TransferEngine*>(self);
  pt_mr* memory = nullptr;
  const pt_memory given{start, bytes, 0};
  const int status = end.library_.pt_reg_mrs(end.engine_, &given, 1, device, &kGroup, 1, &memory);
  if (status != PT_OK) return end.tell(status);
  if (end.regions_.add(memory, *region)) return PUTGET_TRANSPORT_OK;
  end.library_.pt_mr_destroy(end.engine_, memory);
  return end.refuse("too many regions");
}

int TransferEngine::describe_region(void* self, uint32_t region, uint8_t* description, uint64_t* bytes) {
  TransferEngine& end = *static_cast<TransferEngine*>(self);
  size_t length = *bytes;
  const int status = end.tell(end.library_.pt_mr_describe(end.regions_[region], description, &length));
  *bytes = length;
  return status;
}

int TransferEngine::address(void* self, uint8_t* address, uint64_t* bytes) {
  TransferEngine& end = *static_cast<TransferEngine*>(self);
  size_t length = *bytes < kImmBytes ? 0 : *bytes - kImmBytes;
  const int status = end.tell(end.library_.pt_engine_address(end.engine_, address, &length));
  *bytes = length + kImmBytes;
  if (status == PUTGET_TRANSPORT_OK) std::memcpy(address + length, &end.first_imm_, kImmBytes);
  return status;
}

// Connects now, so that the first round finds the connection, and whoever cannot be reached is found out before it.
int TransferEngine::add_peer(void* self, const uint8_t* address, uint64_t bytes, uint32_t* peer) {
  TransferEngine& end = *static_cast<TransferEngine*>(self);
  if (bytes < kImmBytes) return end.refuse("the address is cut off");
  const std::string key(reinterpret_cast<const char*>(address), bytes);
  const auto known = end.peers_.find(key);
  if (known != end.peers_.end()) {
    *peer = known->second;
    return PUTGET_TRANSPORT_OK;
  }
  // The answer comes from a thread of the engine's.
  struct Answer {
    std::atomic<int> status{-1};
    std::string words;
  } answer;
  pt_submit submit{};
  submit.size = sizeof(submit);
  submit.nic = submit.device_group = -1;
  submit.context = &answer;
  submit.done = [](void* context, int status, const char* message) {
    Answer& told = *static_cast<Answer*>(context);
    if (message != nullptr) told.words = message;
    told.status.store(status, std::memory_order_release);
  };
  pt_group* group = nullptr;
  const size_t length = bytes - kImmBytes;
  const int status = end.library_.pt_add_peer_group(end.engine_, &address, &length, 1, &submit, &group);
  if (status != PT_OK) return end.tell(status);
  // It is over when the set-up's own time has passed, at the latest.
  while (answer.status.load(std::memory_order_acquire) < 0) std::this_thread::sleep_for(kBetweenLooks);
  end.library_.pt_group_destroy(group);
  if (answer.status != PT_OK) {
    words() = answer.words;
    return PUTGET_TRANSPORT_SYSTEM;
  }
  uint32_t first_imm = 0;
  std::memcpy(&first_imm, address + length, kImmBytes);
  *peer = static_cast<uint32_t>(end.peers_.size());
  end.peers_.emplace(key, *peer);
  end.peer_imms_.push_back(first_imm);
  return PUTGET_TRANSPORT_OK;
}

int TransferEngine::add_target(void* self, uint32_t peer, const uint8_t* description, uint64_t bytes,
                               uint32_t* target) {
  TransferEngine& end = *static_cast<TransferEngine*>(self);
  if (peer >= end.peers_.size()) return end.refuse("no such peer");
  pt_desc* made = nullptr;
  const int status = end.library_.pt_desc_create(description, bytes, &made);
  if (status != PT_OK) return end.tell(status);
  auto entry = std::make_unique<Target>(Target{made, end.peer_imms_[peer]});
  if (end.targets_.add(entry.get(), *target)) {
    entry.release();
    return PUTGET_TRANSPORT_OK;
  }
  end.library_.pt_desc_destroy(made);
  return end.refuse("too many targets");
}

int TransferEngine::counter_word(void* self, uint32_t imm, const uint64_t** word) {
  TransferEngine& end = *static_cast<TransferEngine*>(self);
  if (!has_place(imm, end.sender_bits_)) return end.refuse("no such sender");
  const uint32_t counted = end.first_imm_ + place_in_range(imm, end.sender_bits_);
  return end.tell(end.library_.pt_imm_word(end.engine_, counted, word));
}

int TransferEngine::write(void* self, const putget_transport_write* write) {
  TransferEngine& end = *static_cast<TransferEngine*>(self);
  const Target* const target = end.targets_[write->target];
  if (target == nullptr || !has_place(write->imm, end.sender_bits_)) return end.refuse("no such target or sender");
  const pt_mr* const source = write->bytes == 0 ? nullptr : end.regions_[write->region];
  pt_submit submit{};
  submit.size = sizeof(submit);
  submit.nic = submit.device_group = -1;
  submit.has_imm = 1;
  submit.imm = target->first_imm + place_in_range(write->imm, end.sender_bits_);
  submit.deadline = end.write_deadline_;
  submit.word = write->over;
  // A message's parcels take NICs by turns.
  pt_poster* const poster = end.posters_[end.next_];
  const int status = end.library_.pt_post_write(poster, write->bytes, source, write->src_offset, target->desc,
                                                write->dst_offset, &submit);
  if (status == PT_BUSY) return PUTGET_TRANSPORT_FULL;
  if (status != PT_OK) return end.tell(status);
  end.next_ = end.next_ + 1 == end.posters_.size() ? 0 : end.next_ + 1;
  return PUTGET_TRANSPORT_OK;
}

int TransferEngine::remove_region(void* self, uint32_t region) {
  TransferEngine& end = *static_cast<TransferEngine*>(self);
  pt_mr* const memory = end.regions_[region];
  if (memory == nullptr) return end.refuse("no such region");
  const int status = end.library_.pt_mr_destroy(end.engine_, memory);
  // Refused while writes of this end are under way; any other failure has ended it.
  if (status != PT_INVALID) end.regions_.take(region);
  return end.tell(status);
}

const char* TransferEngine::error(void*) { return words().c_str(); }

}  // namespace putget::proxy
