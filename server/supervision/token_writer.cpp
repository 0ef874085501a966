// Token writer: writes the plain tokens of plain streams from the engine's pipe to clients' sockets, on a thread of its own.
//
// It reads the engine's messages. A token is plain if its text is known here and it is not the last of its sequence; a stream is plain if
// Python has registered its sequence with a template of its events and a client's socket, and has nothing of its own to write there. Such
// a token becomes an event, as one chunk of HTTP/1.1, and is kept until Python collects it. Everything else is queued for Python as it came.
// Invariants: the tokens of a sequence reach its client in order, each once, whether they are written here or by Python: a sequence of which
// a token was queued is not written here until it is registered again, with the index of its next token, and Python ignores queued tokens
// before that one; nothing is written to a client that is held or disconnected. Memory is bounded: the thread stops reading while MAX_QUEUED bytes wait for Python.
// It knows no dialects, tokenizers or requests.

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <deque>
#include <memory>
#include <mutex>
#include <poll.h>
#include <string>
#include <string_view>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <unordered_map>
#include <vector>

namespace {

constexpr size_t READ_BYTES = 1 << 18, MAX_QUEUED = 1 << 20, MAX_QUEUED_TOKENS = 1 << 12, MAX_MESSAGE = 64 << 20, CHUNK_HEAD = 10;
constexpr std::string_view TOKENS = "\x93\xa6Tokens";  // An array of three, the first of which is the message's tag.
constexpr std::string_view DONE = "\r\n";
enum Kind : char { MESSAGE = 0, UNSENT = 1 };  // What Python takes: a message of the engine, or the number of a client with unsent bytes.
enum Slot : char { TOKEN_ID = 'I', TEXT = 'T', LOGPROB = 'L', COUNT = 'N', END = 'E' };

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

// A reader of msgpack (github.com/msgpack/msgpack/blob/master/spec.md). `ok` turns false at what is not expected, and stays so.
struct Reader {
    const uint8_t *at, *end;
    bool ok = true;

    uint64_t big_endian(int num_bytes) {
        if (end - at < num_bytes) return ok = false, 0;
        uint64_t value = 0;
        for (int i = 0; i < num_bytes; ++i) value = value << 8 | *at++;
        return value;
    }

    uint8_t type() { return ok && at < end ? *at++ : (ok = false, 0xc1); }

    int64_t integer() {
        const uint8_t first = type();
        if (first < 0x80 || first >= 0xe0) return int8_t(first);
        if (first >= 0xcc && first <= 0xcf) return int64_t(big_endian(1 << (first - 0xcc)));
        if (first >= 0xd0 && first <= 0xd3) {
            const int bits = 8 << (first - 0xd0);
            return int64_t(big_endian(bits / 8) << (64 - bits)) >> (64 - bits);
        }
        return ok = false, 0;
    }

    double number() {
        if (type() != 0xcb) return ok = false, 0.0;
        const uint64_t bits = big_endian(8);
        double value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }

    size_t array() {
        const uint8_t first = type();
        if ((first & 0xf0) == 0x90) return first & 0x0f;
        if (first == 0xdc || first == 0xdd) return big_endian(first == 0xdc ? 2 : 4);
        return ok = false, 0;
    }

    void skip_bytes(uint64_t num_bytes) {
        if (!ok || uint64_t(end - at) < num_bytes) ok = false;
        else at += num_bytes;
    }

    // Skips one value; of those with parts, only arrays are expected.
    void skip() {
        for (uint64_t left = 1; left && ok; --left) {
            const uint8_t first = type();
            if ((first & 0xf0) == 0x90) left += first & 0x0f;
            else if ((first & 0xe0) == 0xa0) skip_bytes(first & 0x1f);
            else if (first < 0x80 || first >= 0xe0 || first == 0xc0 || first == 0xc2 || first == 0xc3) continue;
            else if (first == 0xca || first == 0xcb) skip_bytes(first == 0xca ? 4 : 8);
            else if (first >= 0xcc && first <= 0xd3) skip_bytes(1 << ((first - 0xcc) & 3));
            else if (first >= 0xd9 && first <= 0xdb) skip_bytes(big_endian(1 << (first - 0xd9)));
            else if (first >= 0xc4 && first <= 0xc6) skip_bytes(big_endian(1 << (first - 0xc4)));
            else if (first == 0xdc || first == 0xdd) left += big_endian(first == 0xdc ? 2 : 4);
            else ok = false;
        }
    }
};

struct Token {
    int64_t id, index, token;
    double logprob;
    bool is_usual;  // Neither the last token of its sequence, nor with the most likely ones beside it.
    const uint8_t *begin, *end;
};

// What a token adds to a text, as a string of JSON and as it is.
struct Text {
    std::string json, raw;
};

// The texts of tokens by id, which are set once each, while threads read others.
class Texts {
  public:
    explicit Texts(size_t num_tokens) : texts_(num_tokens) {}

    ~Texts() {
        for (const auto &text : texts_) delete text.load();
    }

    void set(size_t token, std::string_view json, std::string_view raw) {
        const Text *none = nullptr;
        if (token >= texts_.size()) return;
        const auto *text = new Text{std::string(json), std::string(raw)};
        if (!texts_[token].compare_exchange_strong(none, text, std::memory_order_release)) delete text;
    }

    const Text *get(uint64_t token) const { return token < texts_.size() ? texts_[token].load(std::memory_order_acquire) : nullptr; }

  private:
    std::vector<std::atomic<const Text *>> texts_;
};

struct Client {
    int socket;
    bool is_held = true;
    double last_write = 0.0;
    std::string events;  // Those of the messages just read, after room for the head of a chunk.
    std::string unsent;  // What its socket did not take.
};

struct Part {
    std::string literal;
    char slot;  // What follows it.
};

struct Queued {
    int64_t index, token;
    double logprob, time;
    const Text *text;  // Null if Python must write it.
};

struct Sequence {
    int64_t client, next_index, count;
    double last;
    bool is_python_next = false;  // Whether a token of it was queued for Python since it was registered.
    std::deque<Queued> queued;  // Those tokens, until Python registers it with a later one.
    std::vector<Part> parts;
    bool is_stop_byte[256] = {};  // Bytes of a token's text that may begin a stop string.
    std::vector<int32_t> ids;
};

struct Histogram {
    std::vector<double> bounds;
    std::vector<int64_t> counts;
    double sum = 0.0;

    void observe(double value) {
        size_t i = 0;
        while (i < bounds.size() && bounds[i] < value) ++i;
        ++counts[i];
        sum += value;
    }
};

void append_integer(std::string &out, int64_t value) {
    char digits[24];
    out.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}

// The shortest decimal number that is read as `value`, as msgspec writes it: with an exponent below 1e-5 and from 1e16 on.
void append_number(std::string &out, double value) {
    if (!std::isfinite(value)) return void(out.append("null"));
    char text[40];
    char *end = std::to_chars(text, text + sizeof text, value, std::chars_format::scientific).ptr;
    char *at = text;
    if (*at == '-') out += *at++;
    char *mark = std::find(at, end, 'e');
    int exponent = 0;
    std::from_chars(mark[1] == '+' ? mark + 2 : mark + 1, end, exponent);
    std::string digits(1, *at);
    if (mark - at > 2) digits.append(at + 2, mark);
    const int num_digits = int(digits.size());
    if (exponent < -5 || exponent >= 16) {
        out += digits[0];
        if (num_digits > 1) out.append(1, '.').append(digits, 1);
        out += 'e';
        append_integer(out, exponent);
    } else if (exponent < 0) {
        out.append("0.").append(size_t(-exponent - 1), '0').append(digits);
    } else if (num_digits <= exponent + 1) {
        out.append(digits).append(size_t(exponent + 1 - num_digits), '0').append(".0");
    } else {
        out.append(digits, 0, size_t(exponent + 1)).append(1, '.').append(digits, size_t(exponent + 1));
    }
}

class TokenWriter {
  public:
    TokenWriter(int pipe, int event, std::shared_ptr<const Texts> texts, const double *bounds, int64_t num_bounds)
        : pipe_(pipe), event_(event), texts_(std::move(texts)) {
        for (Histogram *histogram : {&between_tokens_, &steps_}) {
            histogram->bounds.assign(bounds, bounds + num_bounds);
            histogram->counts.assign(size_t(num_bounds) + 1, 0);
        }
        thread_ = std::thread([this] { run(); });
    }

    ~TokenWriter() {
        thread_.join();
        close(pipe_);
    }

    // What was queued, and was not yet taken; valid until the next call. -1 once the pipe has ended and all was taken.
    int64_t take(const char **data) {
        std::lock_guard lock(mutex_);
        uint64_t count;
        (void)!read(event_, &count, sizeof count);
        taken_.clear();
        taken_.swap(queue_);
        room_.notify_one();
        *data = taken_.data();
        if (has_ended_ && !taken_.empty()) wake();  // The end is for the next call.
        return taken_.empty() && has_ended_ ? -1 : int64_t(taken_.size());
    }

    int64_t connect(int socket) {
        std::lock_guard lock(mutex_);
        Client &client = clients_[++last_client_];
        client.socket = socket;
        client.events.assign(CHUNK_HEAD, ' ');
        return last_client_;
    }

    // Nothing is written to a client any more until `release`. Returns what its socket did not take, valid until the next call.
    int64_t hold(int64_t number, const char **unsent) {
        std::lock_guard lock(mutex_);
        const auto found = clients_.find(number);
        if (found == clients_.end()) return 0;
        send_events(found->first, found->second);
        found->second.is_held = true;
        taken_unsent_.clear();
        taken_unsent_.swap(found->second.unsent);
        *unsent = taken_unsent_.data();
        return int64_t(taken_unsent_.size());
    }

    void release(int64_t number) {
        std::lock_guard lock(mutex_);
        const auto found = clients_.find(number);
        if (found == clients_.end() || !found->second.unsent.empty()) return;  // Python learns of unsent bytes, and sends them first.
        found->second.is_held = false;
        send_events(found->first, found->second);
    }

    void disconnect(int64_t number) {
        std::lock_guard lock(mutex_);
        clients_.erase(number);
    }

    double last_write(int64_t number) {
        std::lock_guard lock(mutex_);
        const auto found = clients_.find(number);
        return found == clients_.end() ? 0.0 : found->second.last_write;
    }

    void add(int64_t id, int64_t client, int64_t next_index, int64_t count, double last, std::string_view pattern, std::string_view stop_bytes) {
        std::lock_guard lock(mutex_);
        Sequence &sequence = sequences_[id];
        sequence.client = client;
        sequence.next_index = next_index;
        sequence.count = count;
        sequence.last = last;
        sequence.is_python_next = false;
        for (size_t begin = 0; begin < pattern.size();) {
            size_t mark = pattern.find('\0', begin);  // JSON has no byte 0: one stands before the letter of a slot.
            if (mark == pattern.npos) mark = pattern.size();
            const char slot = mark + 1 < pattern.size() ? pattern[mark + 1] : char(END);
            sequence.parts.push_back({std::string(pattern.substr(begin, mark - begin)), slot});
            begin = mark + 2;
        }
        for (const char byte : stop_bytes) sequence.is_stop_byte[uint8_t(byte)] = true;
        // Where Python is behind, tokens that it has not taken yet are written here; it ignores them then, as they have been collected.
        std::deque<Queued> &queued = sequence.queued;
        while (!queued.empty() && queued.front().index < next_index) queued.pop_front();
        const auto found = clients_.find(client);
        for (; !queued.empty() && queued.front().index == sequence.next_index && queued.front().text && found != clients_.end(); queued.pop_front())
            add_event(sequence, found->second, queued.front());
        sequence.is_python_next = !queued.empty();
    }

    void remove(int64_t id) {
        std::lock_guard lock(mutex_);
        sequences_.erase(id);
    }

    // The tokens of a sequence that were written since the last call, as many as fit, and the time of the last one.
    int64_t collect(int64_t id, int32_t *ids, int64_t most, double *last) {
        std::lock_guard lock(mutex_);
        const auto found = sequences_.find(id);
        if (found == sequences_.end()) return 0;
        std::vector<int32_t> &written = found->second.ids;
        const size_t count = std::min(written.size(), size_t(most));
        std::copy_n(written.begin(), count, ids);
        written.erase(written.begin(), written.begin() + std::ptrdiff_t(count));
        *last = found->second.last;
        return int64_t(count);
    }

    // Counts since the last call: of both histograms, one after the other; their sums; tokens written. The last gauges, valid until then.
    int64_t take_counts(int64_t *counts, double *sums, int64_t *num_tokens, const char **gauges) {
        std::lock_guard lock(mutex_);
        for (Histogram *histogram : {&between_tokens_, &steps_}) {
            for (int64_t &count : histogram->counts) {
                *counts++ = count;
                count = 0;
            }
            *sums++ = histogram->sum;
            histogram->sum = 0.0;
        }
        *num_tokens = num_written_;
        num_written_ = 0;
        taken_gauges_.clear();
        taken_gauges_.swap(gauges_);
        *gauges = taken_gauges_.data();
        return int64_t(taken_gauges_.size());
    }

    void discard() {
        std::lock_guard lock(mutex_);
        is_discarding_ = true;
        room_.notify_one();
    }

  private:
    void run() {
        std::vector<char> buffer(READ_BYTES);
        while (true) {
            {
                std::unique_lock lock(mutex_);
                room_.wait(lock, [this] { return queue_.size() < MAX_QUEUED || is_discarding_; });
            }
            const ssize_t count = recv(pipe_, buffer.data(), buffer.size(), 0);
            if (count < 0 && (errno == EINTR || errno == EAGAIN)) {
                pollfd pipe = {pipe_, POLLIN, 0};
                poll(&pipe, 1, -1);  // Python's end of the same socket may not block.
                continue;
            }
            if (count <= 0) break;
            received_.append(buffer.data(), size_t(count));
            handle_messages();
        }
        std::lock_guard lock(mutex_);
        has_ended_ = true;
        wake();
    }

    // Messages with the head that multiprocessing writes: four bytes, the most significant first. Instead of one that is too long, Python
    // gets an empty one, which it refuses.
    void handle_messages() {
        std::unique_lock lock(mutex_);
        const double time = now();
        size_t begin = 0;
        while (received_.size() - begin >= 4) {
            Reader head{(const uint8_t *)received_.data() + begin, (const uint8_t *)received_.data() + begin + 4};
            const uint64_t length = head.big_endian(4);
            if (length <= MAX_MESSAGE && received_.size() - begin - 4 < length) break;
            const std::string_view message = length > MAX_MESSAGE ? "" : std::string_view(received_).substr(begin + 4, length);
            begin += 4 + message.size();
            if (is_discarding_) continue;
            if (message.substr(0, TOKENS.size()) != TOKENS || !handle_tokens(message, time)) queue(MESSAGE, message);
            is_discarding_ = length > MAX_MESSAGE;
        }
        received_.erase(0, begin);
        // All events are made before the first is sent: a client that wakes up may take this processor.
        for (size_t i = 0; i < unsent_.size(); ++i) {
            const auto found = clients_.find(unsent_[i]);
            if (found != clients_.end() && !found->second.is_held) send_events(found->first, found->second);
            if (i % 16 == 15) {  // Python may be waiting for the lock.
                lock.unlock();
                std::this_thread::yield();
                lock.lock();
            }
        }
        unsent_.clear();
    }

    // Returns false for a message that is not understood, of which nothing was written then.
    bool handle_tokens(std::string_view message, double time) {
        const auto *end = (const uint8_t *)message.data() + message.size();
        Reader reader{(const uint8_t *)message.data() + TOKENS.size(), end};
        tokens_.resize(std::min(reader.array(), message.size()));
        for (Token &token : tokens_) {
            token.begin = reader.at;
            if (reader.array() != 6) reader.ok = false;
            token.id = reader.integer();
            token.index = reader.integer();
            token.token = reader.integer();
            token.logprob = reader.number();
            token.is_usual = reader.ok && end - reader.at >= 2 && reader.at[0] == 0xc0 && reader.at[1] == 0x90;
            reader.skip();
            reader.skip();
            token.end = reader.at;
        }
        const uint8_t *gauges = reader.at;
        if (reader.array() < 5) return false;
        for (int i = 0; i < 4; ++i) reader.skip();
        const double step_seconds = reader.number();
        if (!reader.ok) return false;
        size_t num_left = 0;
        for (const Token &token : tokens_)
            if (!write(token, time)) tokens_[num_left++] = token;
        if (num_left) {
            queue_rest(num_left, std::string_view((const char *)gauges, size_t(end - gauges)));
            gauges_.clear();  // Those that Python gets now are newer.
        } else {
            gauges_.assign((const char *)gauges, size_t(end - gauges));
            if (step_seconds != 0.0) steps_.observe(step_seconds);
        }
        return true;
    }

    // Writes a plain token. Returns false for one that is Python's to write.
    bool write(const Token &token, double time) {
        const auto found = sequences_.find(token.id);
        if (found == sequences_.end()) return false;
        Sequence &sequence = found->second;
        const Text *text = token.is_usual ? texts_->get(uint64_t(token.token)) : nullptr;
        if (text && may_begin_a_stop(sequence, text->raw)) text = nullptr;
        const Queued plain = {token.index, token.token, token.logprob, time, text};
        const auto client = clients_.find(sequence.client);
        if (sequence.is_python_next || !text || token.index != sequence.next_index || client == clients_.end() || client->second.is_held) {
            sequence.is_python_next = true;
            sequence.queued.push_back(plain);
            if (sequence.queued.size() > MAX_QUEUED_TOKENS) sequence.queued.pop_front();
            return false;
        }
        if (client->second.events.size() == CHUNK_HEAD) unsent_.push_back(client->first);
        add_event(sequence, client->second, plain);
        ++num_written_;
        return true;
    }

    // Adds the event of a plain token to those of its client.
    void add_event(Sequence &sequence, Client &client, const Queued &token) {
        std::string &out = client.events;
        ++sequence.count;
        for (const Part &part : sequence.parts) {
            out += part.literal;
            switch (part.slot) {
                case TOKEN_ID: append_integer(out, token.token); break;
                case TEXT: out += token.text->json; break;
                case LOGPROB: append_number(out, token.logprob); break;
                case COUNT: append_integer(out, sequence.count); break;
                default: break;
            }
        }
        ++sequence.next_index;
        sequence.ids.push_back(int32_t(token.token));
        between_tokens_.observe(token.time - sequence.last);
        sequence.last = token.time;
    }

    static bool may_begin_a_stop(const Sequence &sequence, std::string_view text) {
        return std::any_of(text.begin(), text.end(), [&](char byte) { return sequence.is_stop_byte[uint8_t(byte)]; });
    }

    // Sends a client's events as one chunk. What its socket does not take is Python's to write, and the client is held.
    void send_events(int64_t number, Client &client) {
        std::string &out = client.events;
        if (out.size() == CHUNK_HEAD) return;
        char head[CHUNK_HEAD];
        const size_t length = size_t(std::to_chars(head, head + CHUNK_HEAD - DONE.size(), out.size() - CHUNK_HEAD, 16).ptr - head);
        memcpy(head + length, DONE.data(), DONE.size());
        const size_t begin = CHUNK_HEAD - length - DONE.size();
        memcpy(out.data() + begin, head, length + DONE.size());
        out += DONE;
        const std::string_view chunk = std::string_view(out).substr(begin);
        // After what its socket did not take before.
        ssize_t sent = client.unsent.empty() ? ::send(client.socket, chunk.data(), chunk.size(), MSG_DONTWAIT | MSG_NOSIGNAL) : 0;
        if (sent < 0) sent = 0;  // Python's write of it finds a lost connection, too.
        if (size_t(sent) < chunk.size()) {
            client.is_held = true;
            client.unsent.append(chunk.substr(size_t(sent)));
            queue(UNSENT, std::string_view((const char *)&number, sizeof number));
        }
        client.last_write = now();
        out.resize(CHUNK_HEAD);
    }

    // Queues a message with the tokens that are left of one.
    void queue_rest(size_t num_left, std::string_view gauges) {
        rest_.assign(TOKENS);
        rest_ += '\xdd';
        for (int shift = 24; shift >= 0; shift -= 8) rest_ += char(num_left >> shift & 0xff);
        for (size_t i = 0; i < num_left; ++i) rest_.append((const char *)tokens_[i].begin, size_t(tokens_[i].end - tokens_[i].begin));
        rest_ += gauges;
        queue(MESSAGE, rest_);
    }

    void queue(Kind kind, std::string_view data) {
        if (queue_.empty()) wake();
        const uint32_t length = uint32_t(data.size());
        queue_ += char(kind);
        queue_.append((const char *)&length, sizeof length).append(data);
    }

    void wake() {
        const uint64_t one = 1;
        (void)!::write(event_, &one, sizeof one);
    }

    const int pipe_, event_;
    const std::shared_ptr<const Texts> texts_;
    std::string received_;  // Bytes of messages that are not complete. Of the thread alone, as are tokens_, unsent_ and rest_.
    std::vector<Token> tokens_;
    std::vector<int64_t> unsent_;  // Clients with events to send.
    std::string rest_;
    std::mutex mutex_;  // Of all that follows.
    std::condition_variable room_;
    std::string queue_, taken_, taken_unsent_, gauges_, taken_gauges_;
    bool has_ended_ = false, is_discarding_ = false;
    std::unordered_map<int64_t, Sequence> sequences_;
    std::unordered_map<int64_t, Client> clients_;
    int64_t last_client_ = 0, num_written_ = 0;  // Tokens that were not queued for Python.
    Histogram between_tokens_, steps_;
    std::thread thread_;
};

}  // namespace

extern "C" {

int64_t token_writer_interface() { return 1; }

std::shared_ptr<Texts> *token_texts_open(int64_t num_tokens) { return new std::shared_ptr<Texts>(new Texts(size_t(num_tokens))); }
void token_texts_close(std::shared_ptr<Texts> *texts) { delete texts; }

void token_texts_set(std::shared_ptr<Texts> *texts, int64_t token, const char *json, int64_t json_bytes, const char *raw, int64_t raw_bytes) {
    (*texts)->set(size_t(token), {json, size_t(json_bytes)}, {raw, size_t(raw_bytes)});
}

// Null if no thread can be started. The writer owns the descriptor of the pipe from then on.
TokenWriter *token_writer_open(int64_t pipe, int64_t event, std::shared_ptr<Texts> *texts, const double *bounds, int64_t num_bounds) {
    try {
        return new TokenWriter(int(pipe), int(event), *texts, bounds, num_bounds);
    } catch (...) {
        return nullptr;
    }
}

// After the end of the pipe.
void token_writer_close(TokenWriter *writer) { delete writer; }

int64_t token_writer_take(TokenWriter *writer, const char **data) { return writer->take(data); }
int64_t token_writer_connect(TokenWriter *writer, int64_t socket) { return writer->connect(int(socket)); }
int64_t token_writer_hold(TokenWriter *writer, int64_t client, const char **unsent) { return writer->hold(client, unsent); }
void token_writer_release(TokenWriter *writer, int64_t client) { writer->release(client); }
void token_writer_disconnect(TokenWriter *writer, int64_t client) { writer->disconnect(client); }
double token_writer_last_write(TokenWriter *writer, int64_t client) { return writer->last_write(client); }

void token_writer_add(
    TokenWriter *writer, int64_t id, int64_t client, int64_t next_index, int64_t count, double last, const char *pattern, int64_t pattern_bytes,
    const char *stop_bytes, int64_t num_stop_bytes
) {
    writer->add(id, client, next_index, count, last, {pattern, size_t(pattern_bytes)}, {stop_bytes, size_t(num_stop_bytes)});
}

void token_writer_remove(TokenWriter *writer, int64_t id) { writer->remove(id); }

int64_t token_writer_collect(TokenWriter *writer, int64_t id, int32_t *ids, int64_t most, double *last) {
    return writer->collect(id, ids, most, last);
}

int64_t token_writer_take_counts(TokenWriter *writer, int64_t *counts, double *sums, int64_t *num_tokens, const char **gauges) {
    return writer->take_counts(counts, sums, num_tokens, gauges);
}

void token_writer_discard(TokenWriter *writer) { writer->discard(); }

}
