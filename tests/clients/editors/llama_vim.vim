" Runs llama.vim's own code against a server: a completion, its acceptance, and an instruction. Sourced by a vim in a terminal:
" vim -N -u NONE -i NONE -n -S llama_vim.vim, with LLAMA_VIM, SERVER and RESULT in the environment. Writes JSON to RESULT.
set hidden nomore shortmess+=I
execute 'set runtimepath^=' . fnameescape($LLAMA_VIM)
let g:llama_config = {
    \ 'endpoint_fim': $SERVER . '/infill', 'endpoint_inst': $SERVER . '/v1/chat/completions',
    \ 'auto_fim': v:false, 'n_predict': 16, 'ring_update_ms': 100, 't_max_predict_ms': 5000,
    \ }
runtime plugin/llama.vim
let s:found = {'messages': ''}
let s:given = ['def add(a, b):', '    ret', '', 'print(add(1, 2))']
let s:polls = 0

function! s:write() abort
    let s:found.messages = execute('messages')
    call writefile([json_encode(s:found)], $RESULT)
    qall!
endfunction

function! s:poll(next, timer) abort
    let s:polls += 1
    if s:polls > 400
        call s:write()
    elseif call(a:next, [])
        call timer_stop(a:timer)
    endif
endfunction

function! s:wait(next) abort
    call timer_start(50, function('s:poll', [a:next]), {'repeat': -1})
endfunction

function! s:complete(timer) abort
    call llama#fim(-1, -1, v:false, [], v:false)
    call s:wait(function('s:completed'))
endfunction

function! s:completed() abort
    " The suggestion, and the speculative one after it.
    if !llama#is_fim_hint_shown() || len(g:cache_data) < 2
        return v:false
    endif
    let s:found.responses = map(values(g:cache_data), 'json_decode(v:val)')
    call llama#fim_accept('full')
    let s:found.completed = getline(1, '$')
    stopinsert
    %yank
    call timer_start(200, function('s:instruct'))
    return v:true
endfunction

function! s:instruct(timer) abort
    call feedkeys("rename it\<CR>", 't')
    call llama#inst(1, 1)
    call s:wait(function('s:instructed'))
endfunction

function! s:instructed() abort
    call cursor(1, 1)
    call llama#inst_accept()
    if getline(1) ==# s:given[0]
        return v:false
    endif
    let s:found.instructed = getline(1, '$')
    call timer_start(1500, {-> s:write()})
    return v:true
endfunction

call setline(1, s:given)
call cursor(2, 99)
call timer_start(300, function('s:complete'))
startinsert!
